"""Who says what, and when: agents on real code, drawn conversations, profiles, traces. Sends and measures nothing."""
