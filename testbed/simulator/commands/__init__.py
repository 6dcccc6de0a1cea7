"""The host's commands, as far as the program uses them; what they cannot do they refuse, naming the limit."""
