"""The flags commands share: the fields of the configuration classes themselves, with the help beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from apex.cli.errors import InputError, input_errors
from apex.config import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.request import SamplingParams

if TYPE_CHECKING:
    from swiftllm.engine import Engine

# The keys of apex.systems.SYSTEMS, which cannot be imported without torch.
SystemName = Literal["swiftllm", "neo", "fastdecode", "apex"]
ModelDir = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL_DIR")]
ProfileFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]

# `--num-gpu-blocks 64`, not `--engine.num-gpu-blocks 64`; `--synchronous` without a `--no-synchronous`.
FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


class Unchecked:
    """A configuration on its way from the command line: its checks run when it becomes one, and what they say
    reaches the user as it is, without the parser's words around it."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class EngineFlags(Unchecked, EngineConfig):
    """What the engine runs and how much memory it may take."""

    model: tyro.conf.Suppress[str] = ""  # an argument of the command itself, before all flags

    def config(self, model: Path) -> EngineConfig:
        return EngineConfig(**{**asdict(self), "model": str(model)})


@dataclass(frozen=True)
class SamplingFlags(Unchecked, SamplingParams):
    """How tokens are chosen and when the output stops."""

    seed: tyro.conf.Suppress[int | None] = None  # the engine's --seed gives each prompt one of its own

    def params(self) -> SamplingParams:
        return SamplingParams(**asdict(self))


@dataclass(frozen=True)
class StrategyFlags(Unchecked, StrategyConfig):
    """How the CPU is used."""

    def config(self, *systems: SystemName) -> StrategyConfig:
        """
        Raises:
            InputError: strategies are asked for and none of ``systems`` has any.
            ValueError: the flags contradict each other.
        """
        if set(systems) == {"swiftllm"} and self != StrategyFlags():
            raise InputError(
                "the strategy flags mean nothing to swiftllm, which is GPU-only: drop them, or name another --system"
            )
        return StrategyConfig(**asdict(self))


@contextmanager
def running(
    system: SystemName, config: EngineConfig, strategy: StrategyConfig, profile: Path | None
) -> Iterator[Engine]:
    """The engine that a command's flags ask for, closed at the end.

    Raises:
        InputError: they ask for something that cannot be had; the message says what to do.
    """
    with input_errors():
        from apex.systems import build_system

        engine = build_system(system, config, strategy, profile=profile)
    with closing(engine):
        yield engine
