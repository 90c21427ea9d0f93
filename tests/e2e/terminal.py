"""A small terminal: enough to see what a person sees of programs that draw over themselves."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|\x1b[()][A-Z0-9]|([^\x1b\r\n]+)|\x1b.")


class Screen:
    """Lines of characters, a cursor, and whether it is shown; colours are only counted."""

    def __init__(self, columns):
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.is_cursor_shown, self.colours = True, 0

    def feed(self, text):
        for match in PIECES.finditer(text):
            piece, (arguments, command, characters) = match.group(), match.groups()
            if characters:
                self._write(characters)
            elif piece == "\r":
                self.column = 0
            elif piece == "\n":
                self._down()
            elif command:
                self._obey(command, arguments)
        return self

    def _write(self, characters):
        for character in characters:
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _obey(self, command, arguments):
        number = int(arguments) if arguments.isdigit() else 1
        if command == "A":
            self.row = max(0, self.row - number)
        elif command == "K" and arguments == "2":
            self.lines[self.row] = ""
        elif command == "m":
            self.colours += bool(re.search(r"(^|;)(3[0-8]|9[0-7])(;|$)", arguments))
        elif command in "hl" and arguments == "?25":
            self.is_cursor_shown = command == "h"
        else:
            raise AssertionError(f"this terminal does not know {arguments!r} {command!r}")

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


class Terminal:
    """A program with a terminal of its own for its three streams."""

    def __init__(self, command, columns=80, rows=24, cwd=None, **environment):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes = termios.tcgetattr(slave)
        plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=plain | {"TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self._slave, self._is_gone = slave, False
        self.screen, self.raw = Screen(columns), ""

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        if not self._is_gone:
            self.close()

    def until(self, is_there, seconds=60.0):
        """Watch until the screen is as wanted, or the program has ended."""
        limit_s = time.monotonic() + seconds
        while not is_there(self.screen):
            assert time.monotonic() < limit_s, f"never came:\n{self.screen.text}"
            if not self._read(0.1) and self.process.poll() is not None and not self._read(0.1):
                break
        assert is_there(self.screen), self.screen.text
        return self.screen

    def ends(self, seconds=60.0):
        """Watch until the program has ended; its exit code."""
        limit_s = time.monotonic() + seconds
        while self.process.poll() is None or self._read(0.0):
            assert time.monotonic() < limit_s, f"never ended:\n{self.screen.text}"
            self._read(0.1)
        return self.process.returncode

    def close(self):
        """Take the terminal away, as somebody who closes its window does."""
        self._is_gone = True
        os.close(self.master)
        os.close(self._slave)

    def interrupt(self):
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def is_as_it_was(self):
        """Whether the cursor shows and the terminal has the modes it had."""
        return self.screen.is_cursor_shown and termios.tcgetattr(self._slave) == self.modes

    def _read(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        part = os.read(self.master, 65536).decode(errors="replace")
        self.raw += part
        self.screen.feed(part)
        return bool(part)
