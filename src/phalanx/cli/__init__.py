"""The command line: commands, what they print, demos."""
