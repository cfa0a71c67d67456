"""The command line: `polyturn` and its subcommands."""
