"""Internals shared by the rooms, without promises: import from the rooms instead."""
