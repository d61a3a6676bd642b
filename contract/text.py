"""Figures in words, for people."""


def duration(seconds: float) -> str:
    """``12 s`` of a whole number, ``42.1 s``, ``3 min 5 s`` or ``2 h 7 min``."""
    seconds = max(seconds, 0)
    if round(seconds, 1) < 60:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
