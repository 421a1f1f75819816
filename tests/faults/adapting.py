"""Mutants of what fits tierd into other programs' training: names under wrappers, adapters."""

from __future__ import annotations

from faults.rounds import Mutant

_NAMES = "pytest tests/state/kinds/test_wrapped_names.py -k"
_BEST = "pytest tests/loaders/test_best.py -k"
_WRAPPED = "tierd/state/kinds/wrapped_names.py"

ADAPTING = (
    Mutant(
        "a submodule called module is taken for DDP's",
        _WRAPPED,
        '    return all(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)\n',
        '    return any(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)\n',
        f"{_NAMES} differs_by_more",
    ),
    Mutant(
        "two names that become one are renamed",
        _WRAPPED,
        "    if len(here) != len(mine) or here.keys() != there.keys():\n",
        "    if here.keys() != there.keys():\n",
        f"{_NAMES} differs_by_more",
    ),
    Mutant(
        "a renamed state forgets its modules' versions",
        _WRAPPED,
        "    if isinstance(metadata, dict) and isinstance(wanted, dict):\n",
        "    if False:\n",
        f"{_NAMES} those_of_the_target",
    ),
    Mutant(
        "the saved mapping itself is renamed",
        _WRAPPED,
        "            found = copy.copy(found) if found is saved else found\n",
        "",
        f"{_NAMES} any_depth",
    ),
    Mutant(
        "a reader ignores ignore_prefixes",
        "tierd/reading/reader.py",
        "            tree = with_names_of(into, tree) if ignore_prefixes else tree\n",
        "",
        f"{_NAMES} names_the_argument",
    ),
    Mutant(
        "a checkpoint of Trainer carries an earlier evaluation's metrics",
        "tierd/adapters/transformers.py",
        '(not name.startswith("eval_") or entry.get("step") == state.global_step)',
        "True",
        f"{_BEST} a_rule_saves",
    ),
    Mutant(
        "Trainer saves beside tierd",
        "tierd/adapters/transformers.py",
        "        wanted, control.should_save = control.should_save, False\n",
        "        wanted = control.should_save\n",
        f"{_BEST} trainers_own",
    ),
    Mutant(
        "a file that stands for a checkpoint may be another run's",
        "tierd/adapters/lightning.py",
        '        if named is not None and named["run"] != self._checkpointer.run:\n',
        "        if False:\n",
        f"{_BEST} lightnings",
    ),
    Mutant(
        "a rank's failed save_state is committed",
        "tierd/adapters/accelerate.py",
        "                self._accelerator.save_state(str(path), **options)\n"
        "            except Exception as raised:\n                error = raised\n"
        "            self._agree(error, SaveFailed)\n",
        "                self._accelerator.save_state(str(path), **options)\n"
        "            except Exception as raised:\n                error = raised\n",
        "pytest tests/loaders/test_accelerate.py",
    ),
    Mutant(
        "a rank of Trainer but the first has no model to resume from",
        "tierd/adapters/transformers.py",
        "    if trainer.args.should_save:\n",
        "    if True:\n",
        "pytest tests/loaders/test_trainer_ranks.py",
    ),
)
