"""The engine's view of the stages: send a step in, receive what came out at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from backends.base import Runner
from node.dataplane.links import LocalLink
from node.worker import Sampled, Stage, StageFailed, StepMessage, Worker

Result = Sampled | StageFailed


class Pipeline(Protocol):
    num_stages: int

    def send(self, message: StepMessage) -> None: ...

    def recv(self, timeout: float | None = None) -> Result | None:
        """The next finished step, in order; None when `timeout` seconds bring none."""
        ...

    def close(self) -> None: ...


class SingleStage:
    """A pipeline of one on this machine: a step is done when `send` returns, in the caller's thread."""

    num_stages = 1

    def __init__(self, runner: Runner) -> None:
        self._stage = Stage(runner, is_last=True)
        self._results: deque[Result] = deque()

    def send(self, message: StepMessage) -> None:
        result = self._stage.handle(message)
        if isinstance(result, StepMessage):
            raise TypeError("the last stage sent a step on")
        self._results.append(result)

    def recv(self, timeout: float | None = None) -> Result | None:
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        self._stage.close()


class LocalStages:
    """Several stages in one process, a thread each, joined by in-process links."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.num_stages = len(runners)
        self._links = [LocalLink() for _ in range(len(runners) + 1)]
        self._stages = [Stage(runner, is_last=i == len(runners) - 1) for i, runner in enumerate(runners)]
        self._workers = [
            Worker(stage, self._links[i], self._links[i + 1], name=f"stage-{i}") for i, stage in enumerate(self._stages)
        ]
        for worker in self._workers:
            worker.start()

    def send(self, message: StepMessage) -> None:
        self._links[0].send(message)

    def recv(self, timeout: float | None = None) -> Result | None:
        return self._links[-1].recv(timeout)

    def close(self) -> None:
        self._links[0].close()
        for worker in self._workers:
            worker.join()
        for stage in self._stages:
            stage.close()


def pipeline_of(runners: Sequence[Runner]) -> Pipeline:
    return SingleStage(runners[0]) if len(runners) == 1 else LocalStages(runners)
