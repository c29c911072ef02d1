"""The command line: `ortolan COMMAND`, one file per command.

Modules here import only click and the standard library when they are imported; a command imports
what it needs when it runs. So `--help` is instant and works on the base install.
"""

from ortolan.cli.app import main

__all__ = ["main"]
