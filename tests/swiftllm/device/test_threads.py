"""Each thread of a process works on the process's GPU: CUDA gives a new thread the first one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import swiftllm
from swiftllm.core.plan import IterationPlan
from swiftllm.device.cuda import CudaDevice
from swiftllm.parallel.channel import Channel as RankChannel
from swiftllm.parallel.team import Peer
from swiftllm.remote.channel import Channel
from swiftllm.remote.frames import Header, Kind
from swiftllm.runtime.workers.thread import CpuWorker
from swiftllm.server.service.service import EngineService
from tests.reference.fake_device import FakeCuda

PATIENCE_S = 30.0
