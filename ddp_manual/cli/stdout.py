"""What a command prints as its result."""

from __future__ import annotations

import errno
import signal

import click

from ddp_manual import terminal

BROKEN_PIPE = 128 + signal.SIGPIPE


def print_result(text: str) -> None:
    """Print the text on stdout.

    Raises:
        DiskFull, BadOption: stdout cannot take it. Exit: its reader has gone.
    """
    try:
        click.echo(text)
    except OSError as error:
        failed = terminal.stdout_failed(error)
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        raise failed from error
