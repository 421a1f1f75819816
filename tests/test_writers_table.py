"""The tables of who can write where, and the tests of their rows: neither is without the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("test_writers_of_tiers.py", "test_writers_on_nodes.py")
SECTION = (
    (HERE.parent / "docs/explanation/attackers.md").read_text().split("\n## Who can write where\n")[1].split("\n## ")[0]
)
ROWS = re.findall(r"^\| `([a-z-]+/[a-z-]+)` \| .+ \|$", SECTION, re.M)

# Rows whose tests, or more of them, stand elsewhere.
ELSEWHERE = {
    "no-key/bytes": (
        "stores/test_encrypted.py::test_object_put_in_the_place_of_another_is_not_believed",
        "stores/test_encrypted.py::test_every_flip_and_every_cut_is_noticed",
        "cli/test_encrypted.py::test_verify_detects_a_damaged_encrypted_checkpoint_and_restore_passes_over_it",
    ),
    "no-key/rolled-back": (
        "end_to_end/test_heads.py::test_a_tier_that_is_an_older_copy_of_itself_is_noticed_by_the_spool",
    ),
    "no-key/foreign": (
        "daemon/test_encrypted.py::test_a_checkpoint_by_somebody_without_the_key_is_never_restored",
        "daemon/test_encrypted.py::test_without_the_key_nothing_is_restored_passed_over_quarantined_or_deleted",
    ),
    "no-key/policy": (
        "daemon/tiers/test_run_policies.py::test_while_a_policy_cannot_be_read_nothing_of_the_run_is_pruned",
        "daemon/tiers/test_run_policies.py::test_default_policy_is_recorded_and_logged_and_gives_way_to_any_given_policy",
    ),
    "watch/link": ("watching/test_unit_watch.py::test_hard_link_of_another_owners_private_file_is_not_taken",),
    "no-key/held-up": ("daemon/tiers/test_intents.py::test_a_mark_from_far_ahead_holds_nothing_up",),
    "no-key/notes": (
        "client/ranks/test_ranks_on_nodes.py::test_on_an_encrypted_tier_notes_are_encrypted_and_others_are_not_believed",
        "client/ranks/test_ranks_on_nodes.py::test_a_note_that_somebody_deletes_or_replaces_ends_in_an_error_or_not_at_all",
    ),
    "key/notes": (
        "client/ranks/test_ranks_on_nodes.py::test_a_note_that_somebody_deletes_or_replaces_ends_in_an_error_or_not_at_all",
    ),
    "no-key/flood": (
        "daemon/tiers/test_oversized.py::test_manifest_of_any_size_is_unusable_and_takes_little_memory",
        "daemon/tiers/test_oversized.py::test_an_object_larger_than_any_of_tierds_is_not_read",
    ),
    "no-key/terminal": (
        "end_to_end/test_planted_names.py::test_no_command_shows_planted_names_as_they_are",
        "end_to_end/test_planted_names.py::test_events_and_systemd_status_are_escaped",
    ),
    "key/code": (
        "dcp/test_metadata.py::test_metadata_that_would_run_something_is_refused_by_name",
        "dcp/test_metadata.py::test_metadata_that_would_hang_or_kill_the_trainer_is_refused_at_once",
        "core/test_manifest.py::test_hostile_content_is_refused_before_anything_is_made_of_it",
    ),
    "tenant/newest": ("core/timeline/test_restore_order.py::test_other_runs_are_none_of_its_business",),
    "tenant/retention": ("cli/test_space.py::test_rm_deletes_a_run_and_no_other",),
    "rank/silent": (
        "client/ranks/test_ranks.py::test_a_checkpoint_is_complete_when_both_ranks_have_saved",
        "client/ranks/test_rank_processes.py::test_a_rank_that_dies_while_others_restore_is_noticed_at_once_and_holds_up_no_save",
        "daemon/test_nodes_incomplete.py::test_a_rank_that_never_saves_again_fills_its_own_node_only_until_something_is_whole_again",
    ),
    "rank/spool": (
        "client/saving/test_small_disk.py::test_where_no_tier_has_anything_the_save_fails_as_before",
        "daemon/test_spool_space.py::test_copy_on_no_tier_is_not_evicted_and_the_wait_for_room_is_bounded",
    ),
    "rank/daemon": (
        "client/saving/test_handoff.py::test_a_bad_message_ends_its_connection_and_nothing_else",
        "client/saving/test_many_connections.py::test_a_save_beside_a_crowd_is_written_by_the_trainer_and_then_handed_over_again",
        "daemon/test_control.py::test_garbage_does_not_disturb_the_daemon",
        "spool/test_permissions.py::test_memory_that_could_be_cut_short_is_not_taken",
    ),
    "user/spool": (
        "end_to_end/test_surroundings.py::test_spool_and_tier_are_closed_to_others_under_any_umask",
        "spool/test_permissions.py::test_new_spool_is_its_owners_alone_under_any_umask",
        "spool/test_permissions.py::test_both_sockets_are_their_owners_alone_from_the_first_moment",
    ),
    "user/daemon": (
        "spool/test_permissions.py::test_the_daemon_turns_another_user_away_and_takes_no_descriptor",
        "spool/test_permissions.py::test_a_client_trusts_no_daemon_of_another_user",
    ),
    "user/above": (
        "spool/test_permissions.py::test_a_spool_of_another_user_is_refused",
        "spool/test_permissions.py::test_directory_above_in_which_everybody_may_rename_is_warned_of",
    ),
    "user/link": (
        "stores/test_file.py::test_a_link_planted_between_any_two_steps_leads_nowhere",
        "spool/test_permissions.py::test_a_link_put_in_place_of_a_room_of_an_open_spool_leads_nowhere",
        "spool/test_links.py::test_a_link_of_another_user_is_refused",
    ),
    "user/target": (
        "cli/test_restore.py::test_restore_uses_nothing_that_another_account_put_in_its_place",
        "cli/test_restore.py::test_restore_writes_nothing_into_a_directory_put_in_place_of_its_own_and_reports_it",
    ),
    "user/key": ("stores/test_encrypted.py::test_a_file_that_is_no_key_or_open_to_others_is_refused",),
    "user/disk": (
        "client/saving/test_handoff.py::test_daemon_reports_a_full_spool_to_the_trainer",
        "daemon/test_spool_space.py::test_copy_on_no_tier_is_not_evicted_and_the_wait_for_room_is_bounded",
    ),
}


def functions(path: Path) -> set[str]:
    return {
        one.name for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def row_of(name: str) -> str | None:
    """The row that a test's name begins with."""
    found = [row for row in ROWS if f"{name}_".startswith(f"test_{row.replace('/', '_').replace('-', '_')}_")]
    return max(found, key=len, default=None)


def test_each_row_is_there_once() -> None:
    assert ROWS and len(ROWS) == len(set(ROWS)) == len(re.findall(r"^\| `", SECTION, re.M))


def test_each_row_has_a_test_and_each_test_a_row() -> None:
    named = {name: row_of(name) for file in FILES for name in functions(HERE / file) if name.startswith("test_")}
    assert [name for name, row in named.items() if row is None] == []
    assert {*named.values(), *ELSEWHERE} == set(ROWS)


@pytest.mark.parametrize("row", ELSEWHERE)
def test_tests_that_the_table_names_exist(row: str) -> None:
    for test in ELSEWHERE[row]:
        file, _, name = test.partition("::")
        assert name in functions(HERE / file), test
