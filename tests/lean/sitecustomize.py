"""Every Python process that tests start loads this, because conftest.py puts this directory on PYTHONPATH.

At its exit an interpreter looks for garbage in all that it has loaded, and frees that. After torch this takes a quarter
of the CPU time of most processes that tests start. What is frozen is left out. `unsynced` says why fsync is left out.
"""

import atexit
import gc
import os

atexit.register(gc.freeze)  # called last, because it is registered first

if "TIERD_TESTS_UNSYNCED" in os.environ:
    import unsynced

    unsynced.leave_out(True)
