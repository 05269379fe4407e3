"""One file a command. Each has one function named `command`, imported only when it is asked for."""
