"""Records in, tables and charts out. Pure functions of a measurement's own document; runs and reads nothing."""
