"""What `dos doctor` looks at: facts of this machine, and what each means for the optimizer.

`findings` and `storage_findings` judge facts that they are given, `facts` and `disks` read them
off the machine, `probe` measures.
"""

from __future__ import annotations

from dos.doctor.facts import examine
from dos.doctor.findings import Finding, report

__all__ = ["Finding", "examine", "report"]
