"""Whether hesscond can do its work on this machine: versions, threads, devices, arithmetic, data and storage.

Each module yields the checks of one group; `examine` runs them all. A check says what it found and, unless all is
well, what to do about it in one sentence. Nothing is changed: what is written is deleted again.
"""

from hesscond.doctor.check import Check, Status
from hesscond.doctor.examination import examine

__all__ = ["Check", "Status", "examine"]
