"""Runs real servers and measures them; writes records. Draws nothing and decides nothing about the tier."""
