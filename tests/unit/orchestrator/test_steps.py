"""The table against a small model: whatever comes, in any order, repeated, late or wrong, each stage goes through each
row once. Time is a number."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import BadInput, ServiceConflict
from engine.orchestrator.ledger import Windows
from engine.orchestrator.steps import EXPIRED, StageRules, Steps
from engine.wire.columns import GENERATED, OWN, SCORES
from engine.wire.messages import TRAIN, Written
from support.rows import Lent, Passed, columns_of, row_of, tokens_of, written_of

EXPECTED = 4
"""Rows of a step."""
STEPS = 3
LEASE_S = 10.0
STAGES = (TRAIN, "reference", "judge")
GIVES = {TRAIN: frozenset(), "reference": frozenset({"ref"}), "judge": frozenset({"mark", "note"})}


REQUESTED = (
    st.sampled_from(STAGES),
    st.integers(0, 1),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.0, 1.0, LEASE_S + 1]),
    st.booleans(),
)
"""Of a request: stage, replica group, budget, seconds since the one before, and whether the stage gets through at
once."""


def has_room(self):
    return len(self.columns) < STEPS


def has_steps(self):
    return bool(self.columns)


def has_rows(self):
    return any(self.columns.values())


def has_leases(self):
    return bool(self.lent)


class TableMachine(RuleBasedStateMachine):
    """A table and its model."""

    @initialize(data=st.data())
    def set_up(self, data):
        orders = st.sampled_from(["arrival", "prompt_order"])
        limits = st.sampled_from([None, LEASE_S])
        self.whole = data.draw(st.booleans())
        self.hold = data.draw(st.booleans())
        needs = {
            TRAIN: frozenset(OWN).union(*(GIVES[name] for name in STAGES if data.draw(st.booleans()))),
            "reference": frozenset(GENERATED),
            "judge": frozenset([SCORES]) | (GIVES["reference"] if data.draw(st.booleans()) else frozenset()),
        }
        self.replica_groups = dict(zip(STAGES, data.draw(st.tuples(*[st.integers(1, 2)] * 3)), strict=True))
        self.stages = {
            name: StageRules(
                name=name,
                needs=needs[name],
                gives=GIVES[name],
                lease_s=data.draw(limits),
                windows=Windows(
                    order=data.draw(orders),
                    replica_groups=self.replica_groups[name],
                    updates=data.draw(st.sampled_from([1, 2])),
                    hold=self.hold and name == TRAIN,
                ),
                whole=self.whole and name == TRAIN,
            )
            for name in STAGES
        }
        self.table = Steps(self.stages.values())
        self.now = 0.0
        self.columns = {}
        """By step and index: each column's digest, by name."""
        self.lent = {}
        self.expired = set()
        self.passed = {}
        """By step and stage."""
        for _ in range(2):
            self.begin()
        if data.draw(st.booleans()):
            self.fill(0)

    # the model ------------------------------------------------------------------------------------

    def ready(self, stage, step):
        found = {index for index, names in self.columns[step].items() if names.keys() >= self.stages[stage].needs}
        return found if not self.stages[stage].whole or len(found) == EXPECTED else set()

    def known(self, step, index, columns):
        self.columns[step].setdefault(index, {}).update({column.name: column.digest for column in columns})

    def finished(self, lent):
        lent.state = "over"
        self.passed[lent.step, lent.stage].done.update(lent.indices)

    @invariant()
    def the_table_is_as_the_model_says(self):
        """After an error too: the model does not change then."""
        assert self.table.numbers == list(self.columns)
        for step, rows in self.columns.items():
            found = {one.index: {column.name: column.digest for column in one.columns} for one in self.table.rows(step)}
            assert found == rows
            assert self.table.find(step).arrived == sum(names.keys() >= set(OWN) for names in rows.values())
            for stage in STAGES:
                ledger = self.table.ledger(step, stage)
                passed = self.passed[step, stage]
                assert (ledger.ready, ledger.done) == (len(self.ready(stage, step)), len(passed.done))
                assert set(passed.done.values()) <= {1}
                assert ledger.is_over == (len(passed.done) == EXPECTED)
                if self.stages[stage].lease_s is None and stage not in self.expired:
                    assert set(passed.given.values()) <= {1}
        for stage in STAGES:
            held = [one for one in self.lent.values() if one.stage == stage and one.state == "held"]
            oldest = self.table.oldest_lease(stage)
            assert (oldest.given if oldest else None) == min(
                (one.given for one in held if one.given != EXPIRED), default=None
            )
            done = sum(len(self.passed[step, stage].done) for step in self.columns)
            waiting = sum(len(self.ready(stage, step)) for step in self.columns) - done
            assert self.table.waiting(stage) == (waiting, done)
        for number, lent in self.lent.items():
            if lent.state in ("replaced", "forgotten"):
                with pytest.raises(ServiceConflict, match=f"lease {number}"):
                    self.table.held(number)
            else:
                found = self.table.held(number)
                assert (found.stage, found.step, found.indices) == (lent.stage, lent.step, lent.indices)
                assert (found.given, found.deliveries) == (lent.given, lent.deliveries)

    # events ---------------------------------------------------------------------------------------

    @precondition(has_room)
    @rule()
    def begin(self):
        step = max(self.columns, default=-1) + 1
        self.table.begin(step, EXPECTED)
        self.columns[step] = {}
        self.passed |= {(step, stage): Passed() for stage in STAGES}

    @precondition(has_steps)
    @rule(data=st.data(), names=st.sampled_from([GENERATED, OWN]), seed=st.integers(0, 1), whole=st.booleans())
    def put(self, data, names, seed, whole):
        step = data.draw(st.sampled_from(list(self.columns)))
        if whole:
            self.fill(step)
        index = data.draw(st.integers(0, EXPECTED - 1))
        row = row_of(step, index, names, seed)
        there = self.columns[step].get(index)
        if there is None:
            assert self.table.add_row(row)
            self.known(step, index, row.columns)
        elif all(there.get(column.name) == column.digest for column in row.columns):
            assert not self.table.add_row(row)
        else:
            with pytest.raises(ServiceConflict, match=f"already has another group {index} "):
                self.table.add_row(row)

    def fill(self, step):
        """Put the rows and scores that a step lacks."""
        for index in range(EXPECTED):
            if index not in self.columns[step]:
                self.table.add_row(row := row_of(step, index))
                self.known(step, index, row.columns)
            elif SCORES not in self.columns[step][index]:
                self.table.add_columns(step, index, columns := columns_of([SCORES]))
                self.known(step, index, columns)

    @rule(step=st.integers(0, STEPS), index=st.sampled_from([-1, EXPECTED]))
    def put_where_no_row_is(self, step, index):
        if step not in self.columns:
            index = 0
        with pytest.raises(ValueError, match="there is no row"):
            self.table.add_row(row_of(step, index))

    @precondition(has_rows)
    @rule(data=st.data(), seed=st.integers(0, 1))
    def score(self, data, seed):
        step, index = data.draw(st.sampled_from([(at, index) for at, rows in self.columns.items() for index in rows]))
        columns = columns_of([SCORES], seed)
        there = self.columns[step][index].get(SCORES)
        if there in (None, columns[0].digest):
            assert self.table.add_columns(step, index, columns) == (there is None)
            self.known(step, index, columns)
        else:
            with pytest.raises(ServiceConflict, match=r"column 'scores' already exists"):
                self.table.add_columns(step, index, columns)

    @precondition(has_steps)
    @rule(
        requests=st.lists(
            st.tuples(*REQUESTED),
            min_size=1,
            max_size=8,
        ),
        data=st.data(),
    )
    def lease(self, requests, data):
        for stage, replica_group, budget, seconds, through in requests:
            self.now += seconds
            step = data.draw(st.sampled_from([None, *self.columns]))
            number = self.take(stage, replica_group % self.replica_groups[stage], budget, step)
            if number is not None and through:
                self.through(number)

    def take(self, stage, replica_group, budget, step):
        """Lease, and check that it is what the stage may get; the lease's number, or None."""
        limit = self.stages[stage].lease_s
        late = {
            number: lent
            for number, lent in self.lent.items()
            if lent.stage == stage
            and lent.state == "held"
            and step in (None, lent.step)
            and (lent.given == EXPIRED or (limit is not None and self.now - lent.given > limit))
        }
        if self.stages[stage].windows.order == "prompt_order":
            budget = (
                20  # windows are cut before anybody asks for them: all replica groups of a stage have the same budget
            )
        held = self.table.lease_window(stage, step, replica_group, budget, consumer="me", now=self.now)
        if held is None:
            assert not late
            for one in [step] if step is not None else list(self.columns):
                free = self.ready(stage, one) - self.passed[one, stage].given.keys()
                windows = self.stages[stage].windows
                waits = windows.hold and len(self.ready(stage, one)) < EXPECTED
                assert not free or waits or windows.order == "prompt_order"
            return None
        assert held.number not in self.lent
        given = self.passed[held.step, stage].given
        if late:
            number = next(
                number for number, lent in late.items() if (lent.step, lent.indices) == (held.step, held.indices)
            )
            late[number].state = "replaced"
            assert held.deliveries == late[number].deliveries + 1
        else:
            assert not given.keys() & set(held.indices), "a row is given to a stage once"
            assert set(held.indices) <= self.ready(stage, held.step)
            assert len(held.indices) == 1 or sum(map(tokens_of, held.indices)) <= budget
        given.update(held.indices)
        self.lent[held.number] = Lent(stage, held.step, held.indices, given=self.now, deliveries=held.deliveries)
        rows = self.table.given_rows(held)
        assert [row.index for row in rows] == list(held.indices)
        assert len({row.mini_batch for row in rows}) == 1
        for row in rows:
            there = self.columns[held.step][row.index]
            assert {column.name: column.digest for column in row.columns} == {
                name: there[name] for name in self.stages[stage].needs
            }
        return held.number

    @precondition(has_leases)
    @rule(data=st.data())
    def acknowledge(self, data):
        number = data.draw(st.sampled_from([*self.lent, 10**6][-6:]))
        lent = self.lent.get(number)
        if lent is None or lent.state in ("replaced", "forgotten") or self.stages[lent.stage].gives:
            with pytest.raises(ServiceConflict, match=f"lease {number}"):
                self.table.acknowledge_lease(number)
        else:
            new = lent.indices if lent.state == "held" else ()
            assert self.table.acknowledge_lease(number) == new
            if new:
                self.finished(lent)

    @precondition(has_leases)
    @rule(
        data=st.data(),
        seed=st.integers(0, 1),
        wrong=st.sampled_from([*[None] * 4, "columns", "no column", "twice", "row", "no row", "row twice", "stage"]),
    )
    def write_columns(self, data, seed, wrong):
        number = data.draw(st.sampled_from(list(self.lent)[-6:]))
        lent = self.lent[number]
        gives = self.stages[lent.stage].gives
        stage = lent.stage
        rows = list(written_of(lent.indices, gives, seed))
        if wrong == "columns":
            rows[-1] = Written(rows[-1].index, columns_of([*gives, "more"]))
        elif wrong == "no column":
            rows[-1] = Written(rows[-1].index, rows[-1].columns[1:])
        elif wrong == "twice":
            rows[-1] = Written(rows[-1].index, rows[-1].columns + rows[-1].columns[:1])
        elif wrong == "row":
            rows += written_of([set(range(EXPECTED + 1)).difference(lent.indices).pop()], gives)
        elif wrong == "no row":
            rows = rows[1:]
        elif wrong == "row twice":
            rows += written_of(lent.indices[:1], gives, 1 - seed)
        elif wrong == "stage":
            stage = next(one for one in STAGES if one != stage)
        there = [self.columns.get(lent.step, {}).get(one.index, {}) for one in rows]
        others = [
            column.name in known and known[column.name] != column.digest
            for known, one in zip(there, rows, strict=True)
            for column in one.columns
        ]
        if lent.state in ("replaced", "forgotten"):
            expected = ServiceConflict
        elif wrong or not gives:
            expected = BadInput
        else:
            expected = ServiceConflict if any(others) else None
        if expected is not None:
            with pytest.raises(expected):
                self.table.write_columns(stage, number, rows)
            return
        assert self.table.write_columns(stage, number, rows) == (lent.state == "held")
        for one in rows:
            self.known(lent.step, one.index, one.columns)
        if lent.state == "held":
            self.finished(lent)

    @precondition(has_steps)
    @rule(stage=st.sampled_from(STAGES), what=st.sampled_from(["expire", "begin again", "forget"]), data=st.data())
    def lose(self, stage, what, data):
        """The consumers of a stage die, the trainer goes back, or a step is over."""
        step = data.draw(st.sampled_from(list(self.columns)))
        if what == "expire":
            self.table.expire(stage)
            self.expired.add(stage)
        elif what == "begin again":
            self.table.again(step)
            self.passed[step, TRAIN] = Passed()
        elif len(self.columns) == STEPS:
            step = min(self.columns)
            self.table.end(step)
            del self.columns[step]
        for lent in self.lent.values():
            if what == "expire" and lent.stage == stage and lent.state == "held":
                lent.given = EXPIRED
            elif what == "begin again" and (lent.stage, lent.step) == (TRAIN, step):
                lent.state = "replaced"
            elif lent.step not in self.columns:
                lent.state = "forgotten"

    def teardown(self):
        """Nothing is lost: when all rows are there, and no consumer dies any more, every stage gets through them."""
        if not hasattr(self, "table"):
            return
        for step in self.columns:
            self.fill(step)
        for number, lent in list(self.lent.items()):
            if lent.state == "held" and self.stages[lent.stage].lease_s is None:
                self.through(number)
        self.now += 10 * LEASE_S
        for _ in range(3):  # a stage may need what another one gives
            for stage in STAGES:
                for step in self.columns:
                    quiet = 0
                    while quiet < self.replica_groups[stage]:
                        for replica_group in range(self.replica_groups[stage]):
                            number = self.take(stage, replica_group, 20, step)
                            quiet = quiet + 1 if number is None else 0
                            if number is not None:
                                self.through(number)
        self.the_table_is_as_the_model_says()
        for step in self.columns:
            for stage in STAGES:
                assert self.table.ledger(step, stage).is_over
                assert set(self.passed[step, stage].given) == set(range(EXPECTED))

    def through(self, number):
        lent = self.lent[number]
        if gives := self.stages[lent.stage].gives:
            assert self.table.write_columns(lent.stage, number, rows := written_of(lent.indices, gives))
            for one in rows:
                self.known(lent.step, one.index, one.columns)
        else:
            assert self.table.acknowledge_lease(number) == lent.indices
        self.finished(lent)


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
