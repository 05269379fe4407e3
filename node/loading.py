"""One model on this machine: checked, measured against the memory there is, loaded, ready to answer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from backends.base import KVRoom
from backends.cpu.engine import CPUBackend, CPURunner
from backends.errors import UnsupportedModelError
from backends.weights.open import open_source
from backends.weights.source import WeightSource
from node import memory
from node.config import Settings
from node.deployment import Deployment
from node.engine.engine import Engine
from node.engine.pipeline import pipeline_of
from node.engine.scheduler import Limits
from node.errors import MemoryShortageError
from node.memory import MemoryPlan
from node.models.chat import ChatTemplate
from node.models.store import ModelStore
from node.models.tokenizer import Tokenizer
from node.units import format_bytes
from partitioner.plan import Shard

log = logging.getLogger("roost")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A deployment, where it came from and what it takes. Closing its engine frees all of it."""

    deployment: Deployment
    path: Path
    plan: MemoryPlan
    backend: str
    runner: CPURunner


def load_deployment(settings: Settings, model: str, store: ModelStore) -> Loaded:
    """Load a model by name or path and start its engine. Blocks for as long as that takes.

    Raises UnknownModelError, ModelFileError, UnsupportedModelError, MemoryShortageError, UsageError.
    """
    began = time.monotonic()
    path = store.resolve(model)
    installed = store.find(model)
    model_id = installed.id if installed is not None else path.stem if path.is_file() else path.name
    source = open_source(path)
    try:
        backend = CPUBackend(settings.num_threads)
        support = backend.supports(source.arch)
        if not support.ok:
            raise UnsupportedModelError(f"{model_id} cannot run here: {support.reason}", "Use another model.")
        allowed = memory.budget(settings.memory)
        plan = memory.plan(source.arch, memory.estimate(source), allowed, settings.context, model_id)
        tokenizer = Tokenizer.load(path, cache=settings.home / "cache")
        chat = ChatTemplate.load(path, tokenizer)
        runner = _load(backend, source, plan, model_id)
    finally:
        source.close()
    engine = Engine(
        pipeline_of([runner]),
        decoder_factory=tokenizer.decoder,
        vocab_size=source.arch.vocab_size,
        limits=Limits(
            context=plan.context,
            num_pages=KVRoom.for_tokens(plan.kv_tokens).num_pages,
            step_tokens=memory.STEP_TOKENS,
        ),
    )
    engine.start()
    deployment = Deployment(
        id=model_id,
        created=int(time.time()),
        context=plan.context,
        arch=source.arch,
        tokenizer=tokenizer,
        chat=chat,
        engine=engine,
        aliases=frozenset({model, str(path)} - {model_id}),
    )
    used = runner.memory()
    log.info(
        "loaded %s in %.1f s: %s weights, %s cache, context %d (%s)",
        model_id,
        time.monotonic() - began,
        format_bytes(used.weights_bytes),
        format_bytes(used.kv_bytes),
        plan.context,
        plan.reason,
    )
    return Loaded(deployment, path, plan, backend.name, runner)


def _load(backend: CPUBackend, source: WeightSource, plan: MemoryPlan, model_id: str) -> CPURunner:
    try:
        return backend.load(Shard.whole(source.arch.num_layers), source, KVRoom.for_tokens(plan.kv_tokens))
    except MemoryError as exc:
        raise MemoryShortageError(
            f"The system gave no memory for {model_id} ({exc}); {format_bytes(plan.budget.num_bytes)} seemed free.",
            "Use a smaller --context or model, or close other programs.",
        ) from exc
