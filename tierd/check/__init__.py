"""Check on a user's own training loop that a resume is exact: `check_resume`, and `assert_resumes` for a test."""

from __future__ import annotations

from tierd.check.engine import assert_resumes, check_resume
from tierd.check.report import Report

__all__ = ["Report", "assert_resumes", "check_resume"]
