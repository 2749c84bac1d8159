"""What `dos doctor` looks at: facts of this machine, and what each means for the optimizer.

`findings` judges facts that it is given, `facts` reads them off the machine, `probe` measures.
"""

from __future__ import annotations

from dos.doctor.facts import examine
from dos.doctor.findings import Finding, report

__all__ = ["Finding", "examine", "report"]
