"""The simulator: the real tier, queue and accounting on virtual time. Only what a device costs is modelled."""
