from engine.orchestrator.pool.circuit_breaker import LIMIT, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def opened():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(LIMIT):
        breaker.record_fault()
    return clock, breaker


def test_it_opens_at_the_third_fault_in_a_row():
    breaker = CircuitBreaker(Clock())
    for fault in (True, True, False, True, True):
        breaker.record_fault() if fault else breaker.record_success()
        assert breaker.passes
    breaker.record_fault()
    assert (breaker.state, breaker.passes, breaker.wait_s) == ("open", False, 1.0)


def test_after_a_second_one_trial_passes_and_its_success_closes_it():
    clock, breaker = opened()
    clock.now += 0.99
    assert not breaker.passes
    clock.now += 0.02
    assert breaker.passes
    assert breaker.begin_request()
    assert not breaker.passes
    breaker.record_success()
    assert (breaker.state, breaker.passes) == ("closed", True)
    assert not breaker.begin_request()


def test_each_trial_that_fails_doubles_the_wait_up_to_a_minute():
    clock, breaker = opened()
    waits = []
    for _ in range(9):
        waits.append(breaker.wait_s)
        clock.now += breaker.wait_s
        assert breaker.begin_request()
        breaker.record_fault()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_what_was_sent_before_it_opened_is_not_held_against_it_again():
    clock, breaker = opened()
    for _ in range(5):
        breaker.record_fault()
    assert breaker.wait_s == 1.0
    clock.now += 1.5
    breaker.record_fault()  # late, before the trial was sent
    assert breaker.passes


def test_a_trial_without_a_verdict_is_given_back():
    clock, breaker = opened()
    clock.now += 1
    breaker.begin_request()
    breaker.give_back()
    assert breaker.passes
