"""Workers that are no workers: hosts in the calling thread, served when somebody waits for them.

The same commands and the same shared rows as elsewhere, so results are the same, and an exception
can be debugged where it happens. A hung environment hangs the caller: deadlines need `thread` or
`process`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from envfleet.engine.backends import Binding, Ground, Launch, WorkerHandle
from envfleet.engine.guard import Guard
from envfleet.engine.messages import Command, EnvFacts, Failure, Op, Reply
from envfleet.engine.servant import BuildFailed, Servant


class SerialHandle:
    """One host in this thread."""

    is_dead = False
    pid: int | None = None

    def __init__(self, launch: Launch, ground: Ground) -> None:
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, Failure] | None = None
        self._control = ground.control
        self._commands: deque[Command] = deque()
        self._done: list[Reply | None] = []
        post = ground.control.posts[launch.worker]
        try:
            self._servant = Servant(
                launch.first,
                launch.env_fns,
                launch.autoreset,
                post,
                Guard(passes=(KeyboardInterrupt,)),
            )
        except BuildFailed as exc:
            self.start_failure = ("build", exc.failure)
        else:
            self.facts = self._servant.facts()

    def bind(self, binding: Binding) -> None:
        """Give the host its rows."""
        self._servant.bind(self._control, binding.data)

    def post(self, command: Command) -> None:
        """Keep it until somebody waits."""
        self._commands.append(command)

    @property
    def has_work(self) -> bool:
        """True if `serve` has something to do."""
        return bool(self._commands)

    def serve(self) -> None:
        """Carry out the oldest command."""
        command = self._commands.popleft()
        try:
            self._servant.idle()  # no sooner: until now the environments were their caller's too
            reply = self._servant.handle(command)
        except BaseException as exc:  # Ctrl-C: the command is over all the same
            slot = self.first if command.slots is None else command.slots[0]
            self._done.append(Reply(failures=[Failure.of(slot, command.op.phrase, exc)]))
            raise
        self._done.append(reply)

    def take(self) -> list[Reply | None]:
        """What has been served."""
        done, self._done = self._done, []
        return done

    @property
    def has_replies(self) -> bool:
        """Whether there is anything to say about what has been served."""
        return any(reply is not None for reply in self._done)

    def exit_code(self) -> int | None:
        """It cannot end."""
        return None

    def stack(self) -> str:
        """It is the caller's own."""
        return "in the calling thread"

    def stop(self) -> None:
        """Nothing to end; let go of the rows."""
        self._commands.clear()
        self.__dict__.pop("_servant", None)
        self.__dict__.pop("_control", None)


class SerialBackend:
    """Everything in the calling thread."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def launch(self, launch: Launch) -> SerialHandle:
        """Build the environments here and now."""
        return SerialHandle(launch, self._ground)

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Serve one command of the first worker that has any."""
        for handle in pending:
            if isinstance(handle, SerialHandle) and handle.has_work:
                handle.serve()
                return

    def lock_step(self, handles: Sequence[WorkerHandle], request: int, limit_s: float) -> bool:
        """Serve a step of all slots here and now, which takes as long as it takes."""
        mine = [handle for handle in handles if isinstance(handle, SerialHandle)]
        for handle in mine:
            handle.post(Command(request, Op.STEP))
        for handle in mine:
            handle.serve()
        if any(handle.has_replies for handle in mine):
            return False
        for handle in mine:
            handle.take()
        return True

    def close(self) -> None:
        """Holds nothing."""
