"""What the rooms stand on. Makes no promises: import from the rooms instead."""
