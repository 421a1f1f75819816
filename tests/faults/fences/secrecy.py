"""Other users, other hosts and planted names get no access, no secret, no path and no code."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Answer, Assume, LeaveOut, Rename, Replace

_SOCKETS = "docs/explanation/attackers.md#the-spool-and-its-sockets"
_HTTP = "docs/explanation/attackers.md#the-http-server"
_SECRETS = "docs/explanation/attackers.md#secrets"
_DATA = "ARCHITECTURE.md#invariants-9"

FENCES = (
    Fence(
        "the daemon answers another user's requests",
        _SOCKETS,
        "secret",
        "ControlServer._serve",
        Assume(False, "foreign_peer_uid"),
        "pytest tests/spool/test_permissions.py -k turns",
    ),
    Fence(
        "the daemon takes another user's memory",
        _SOCKETS,
        "secret",
        "HandoffServer._accept",
        Assume(False, "foreign_peer_uid"),
        "pytest tests/spool/test_permissions.py -k turns",
    ),
    Fence(
        "a client trusts another user's daemon",
        _SOCKETS,
        "secret",
        "ipc.daemon_connection:connect_to_daemon",
        Assume(False, "foreign_peer_uid"),
        "pytest tests/spool/test_permissions.py -k client_trusts",
    ),
    Fence(
        "memory that its sender can truncate is taken",
        _SOCKETS,
        "bound",
        "Arena.received",
        Assume(True, "_SEALS"),
        "pytest tests/spool/test_permissions.py -k short",
    ),
    Fence(
        "a socket is open to others",
        _SOCKETS,
        "secret",
        "bind_private_socket",
        LeaveOut("fchmod"),
        "pytest tests/spool/test_permissions.py -k both_sockets",
    ),
    Fence(
        "a stranger's page reads the HTTP server through a name",
        _HTTP,
        "secret",
        "HttpServer._answer",
        Assume(True, "is_for_us"),
        "pytest tests/daemon/http/test_access.py -k sent_by_another_name",
    ),
    Fence(
        "the HTTP server asks for no token",
        _HTTP,
        "secret",
        "HttpServer._answer",
        Assume(True, "is_permitted"),
        "pytest tests/daemon/http/test_access.py -k only_probes",
    ),
    Fence(
        "a key file may be open to others",
        _SECRETS,
        "secret",
        "read_private_file",
        Assume(False, "S_IMODE"),
        "pytest tests/stores/test_encrypted.py -k no_key_or_open_to_others",
    ),
    Fence(
        "each object is encrypted with one nonce",
        "tierd/FORMAT.md#an-encrypted-tier",
        "secret",
        "EncryptedStore._encrypt",
        Answer("urandom", "bytes(_NONCE)"),
        "pytest tests/stores/test_encrypted.py -k never_have_the_same_nonce",
    ),
    Fence(
        "a message repeats the secret in a URL",
        _SECRETS,
        "secret",
        "core.urls:_shown",
        Assume(False, "search"),
        "pytest tests/end_to_end/test_secrets.py -k url",
    ),
    Fence(
        "a table shows a planted name unescaped",
        "docs/explanation/attackers.md#what-people-see",
        "secret",
        "Table.lines",
        Rename("printable", "str", times=2),
        "pytest tests/end_to_end/test_planted_names.py -k no_command",
    ),
    Fence(
        "a manifest's path may lead anywhere",
        "docs/explanation/attackers.md#shared-directories",
        "path",
        "check_path",
        Assume(False, "any piece pieces"),
        "hostile --only 9",
        "an unsafe path was taken",
    ),
    Fence(
        "a link in an object's place is followed",
        "docs/explanation/attackers.md#shared-directories",
        "path",
        "FileTree.open_object",
        Rename("O_NOFOLLOW", "0"),
        "pytest tests/stores/test_file.py -k symlinks",
    ),
    Fence(
        "a link of a watched directory may lead out of it",
        "docs/howto/inspect.md#links",
        "path",
        "FollowingTree._resolve",
        Assume(True, "is_within within"),
        "pytest tests/watching/test_links.py -k leads_out",
    ),
    Fence(
        "a restore writes by a path that another user may replace",
        "docs/explanation/attackers.md#another-user-of-the-node",
        "path",
        "daemon.transfer.local_files:locked_partial",
        Replace("home Path lock", "home = gathered"),
        "pytest tests/cli/test_restore.py -k put_in_place_of_its_own",
    ),
    Fence(
        "DCP's metadata may name any object",
        _DATA,
        "unpickling",
        "_Machine._name",
        Replace("StateRefused", "global_name = PickledGlobal(f'{module}.{name}', None)"),
        "pytest tests/dcp/test_metadata.py -k refused_by_name",
    ),
    Fence(
        "DCP's metadata may change the object that it names",
        _DATA,
        "unpickling",
        "_Machine._build",
        Assume(False, "PickledInstance"),
        "pytest tests/dcp/test_metadata.py -k change_its_named_objects",
    ),
)
