"""Check on a user's own training loop that a resume is exact: `check_resume`, and `assert_resumes` for a test."""

from __future__ import annotations

from tierd.check.check_report import Report
from tierd.check.resume_check import assert_resumes, check_resume

__all__ = ["Report", "assert_resumes", "check_resume"]
