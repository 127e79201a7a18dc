"""The C++ extension, or what stands for it where it is not built."""

from importlib.util import find_spec
from typing import Any


class NotBuilt:
    """Fails at the first use and not at import: block tables, schedulers and the simulator use no native code."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "the CPU kernels are not built: `python setup.py build_ext --inplace` builds them, and needs g++",
            name="pacpu",
        )


is_built = find_spec("pacpu._pacpu") is not None
if is_built:
    import pacpu._pacpu as native
else:
    native: Any = NotBuilt()
