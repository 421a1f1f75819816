"""Mutants of `tierd/adapters/`."""

from __future__ import annotations

from faults.rounds import Mutant

_TRANSFORMERS = "tierd/adapters/transformers.py"
_TEST_SAME_PROCESS = "pytest tests/loaders/test_same_process.py"
_TEST_BEST = "pytest tests/loaders/test_best.py"

MUTANTS = (
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
        "a state that Lightning loaded in part is saved",
        "tierd/adapters/lightning.py",
        'stage == "fit", False',
        "False, False",
        "pytest tests/loaders/test_adapters.py -k lightning_loaded_in_part",
    ),
    Mutant(
        "a fit of Lightning with nothing left to train leaves saves refused",
        "tierd/adapters/lightning.py",
        "        self._loaded()  # a fit",
        "        pass  # a fit",
        "pytest tests/loaders/test_adapters.py -k lightning_loaded_in_part",
    ),
    Mutant(
        "Lightning saves no step again after a rollback",
        "tierd/adapters/lightning.py",
        "        self._last = LastSave(-1)  # because",
        "        pass  # because",
        f"{_TEST_SAME_PROCESS} -k after_a_rollback",
    ),
    Mutant(
        "a file stands for a checkpoint that Lightning did not get saved",
        "tierd/adapters/lightning.py",
        '        if (waits or self._last.holds(step)) and "://"',
        '        if "://"',
        f"{_TEST_SAME_PROCESS} -k lightning_saves_a_step_whose",
    ),
    Mutant(
        "a save of a loop that was skipped counts as made",
        "tierd/adapters/last_save.py",
        " and (self._save is None or self._save.error() is None)",
        "",
        f"{_TEST_SAME_PROCESS} -k was_skipped",
    ),
    Mutant(
        "a save that failed after it was committed ends the training",
        "tierd/adapters/last_save.py",
        "            if self._save is None or step != self.step:\n                raise\n",
        "            raise\n",
        f"{_TEST_SAME_PROCESS} -k after_it_was_committed",
    ),
    Mutant(
        "a second fit of Keras discards what was trained without a word",
        "tierd/adapters/keras.py",
        ", self._done > found.step\n",
        ", False\n",
        f"{_TEST_SAME_PROCESS} -k second_fit",
    ),
    Mutant(
        "a fit of Keras discards what load_best loaded without a word",
        "tierd/adapters/keras.py",
        "        best, self._best = self._best, None\n",
        "        best, self._best = None, None\n",
        f"{_TEST_SAME_PROCESS} -k second_fit",
    ),
    Mutant(
        "a state that Accelerate loaded in part is saved",
        "tierd/adapters/accelerate.py",
        "        with made_of(self._checkpointer).launch.restoring():",
        "        if True:",
        "pytest tests/loaders/test_adapters.py -k loaded_in_part",
    ),
    Mutant(
        "a file that stands for a checkpoint may be another run's",
        "tierd/adapters/lightning.py",
        '        if named is not None and named["run"] != self._checkpointer.run:\n',
        "        if False:\n",
        f"{_TEST_BEST} -k lightnings",
    ),
    Mutant(
        "a checkpoint of Trainer carries an earlier evaluation's metrics",
        _TRANSFORMERS,
        ' if entry.get("step") == state.global_step]',
        "]",
        "pytest tests/loaders/test_logged.py -k trainer_itself",
    ),
    Mutant(
        "a checkpoint of Lightning has the metric of an earlier step",
        "tierd/adapters/lightning_step.py",
        " if not _is_same(value, self._before.get(name))}",
        "}",
        "pytest tests/loaders/test_logged.py -k model_checkpoints",
    ),
    Mutant(
        "a checkpoint of Lightning lacks the metric of its step's validation",
        "tierd/adapters/lightning_step.py",
        "        if self._at == BATCH:\n",
        "        if False:\n",
        "pytest tests/loaders/test_logged.py -k model_checkpoints",
    ),
    Mutant(
        "a resumed epoch of Lightning ends without a step of its ReduceLROnPlateau",
        "tierd/adapters/lightning_step.py",
        "            trainer.fit_loop.restarting = False\n",
        "            pass\n",
        "pytest tests/loaders/test_killed.py -k on_plateau",
    ),
    Mutant(
        "a checkpoint of Trainer lacks what Trainer does at the end of an epoch",
        _TRANSFORMERS,
        "        if self._wanted == step and not ends:",
        "        if self._wanted == step:",
        "pytest tests/loaders/test_killed.py -k by_epochs",
    ),
    Mutant(
        "Keras saves before its other callbacks have changed the learning rate",
        "tierd/adapters/keras.py",
        "        if callbacks is not None and callbacks.callbacks[-1] is not self:\n",
        "        if False:\n",
        "pytest tests/loaders/test_killed.py -k keras",
    ),
    Mutant(
        "Trainer saves beside tierd",
        _TRANSFORMERS,
        "        control.should_save = self._has_asked = False\n",
        "        self._has_asked = False\n",
        f"{_TEST_BEST} -k trainers_own",
    ),
    Mutant(
        "a rank of Trainer but the first has no model to resume from",
        _TRANSFORMERS,
        "    if trainer.args.should_save:\n",
        "    if True:\n",
        "pytest tests/loaders/test_trainer_ranks.py",
    ),
)
