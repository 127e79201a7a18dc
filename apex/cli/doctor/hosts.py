"""What `apex doctor` says of attention hosts: the way to each, and what it could add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from swiftllm.machine import GIB

# Llama-3.1-8B in bfloat16: 32 layers, 32 query heads on 8 KV heads of 128
LAYERS = 32
ROW_OUT_BYTES, ROW_BACK_BYTES, TOKEN_BYTES = (32 + 2 * 8) * 128 * 2, 32 * 128 * 2, 2 * 8 * 128 * 2
CONTEXT = 1000


def host_lines(addresses: str) -> Iterator[tuple[str, str, Literal["ok", "note"]]]:
    """What was looked at, what was found, and a status of the report, for addresses ``HOST:PORT`` with commas."""
    from swiftllm.remote.frames import parse_address, shared_secret
    from swiftllm.remote.probe import probe_host

    for text in addresses.split(","):
        try:
            way = probe_host(parse_address(text), shared_secret())
        except (OSError, ValueError, RuntimeError) as error:
            yield text, f"not usable: {error}", "note"
            continue
        host, to_gbps, from_gbps = way.host, way.to_host * 8e-9, way.from_host * 8e-9
        yield (
            f"{text}, network",
            f"round trip {1e3 * way.round_trip_s:.2f} ms, {to_gbps:.1f} Gb/s there, {from_gbps:.1f} Gb/s back",
            "ok" if way.round_trip_s < 1e-3 else "note",
        )
        read = host["read_bytes_per_s"] / 1e9
        yield f"{text}, host", f"{host['cpu']} ({host['isa']}), {host['threads']} threads read {read:.1f} GB/s", "ok"
        rows_per_s, is_network = way.rows_per_s(ROW_OUT_BYTES, ROW_BACK_BYTES, CONTEXT * TOKEN_BYTES)
        memory = host["lent_bytes"]
        yield (
            f"{text}, could add",
            f"{memory / GIB:.1f} GiB of KV cache, {memory / (LAYERS * TOKEN_BYTES):,.0f} tokens of Llama-3.1-8B; "
            f"at most {rows_per_s / LAYERS:,.0f} tokens/s of it at {CONTEXT:,} tokens of context, bound by "
            f"{'the network' if is_network else 'its memory'}",
            "ok",
        )
