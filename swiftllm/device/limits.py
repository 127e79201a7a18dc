"""How long the host waits for a device."""

ANSWER_S = 60.0  # that a device gets to finish what the host waits for


class DeviceHung(RuntimeError):
    """The device has not finished its work within ``ANSWER_S``, and may never do so."""
