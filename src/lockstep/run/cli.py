"""See `lockstep.commands.cli`."""

from lockstep.commands.cli import command as command
