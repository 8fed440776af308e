"""When a gateway session may write: the lease, on one monotonic clock."""

from fencepost.sandbox_gateway.lease import Lease
from hypothesis import given
from hypothesis import strategies as st


def test_nothing_may_be_written_before_the_first_renewal() -> None:
    lease = Lease(5_000)
    assert not lease.may_write(0)
    assert not lease.is_over(1_000_000)
    assert lease.renewed(10)
    assert lease.may_write(11)


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    lease = Lease(5_000)
    lease.renewed(1_000)  # answered much later, say at 3,900
    assert lease.may_write(3_999)
    assert not lease.may_write(4_000)
    assert lease.remaining_ms(3_900) == 2_100


def test_writes_stop_well_before_the_lease_is_over() -> None:
    lease = Lease(5_000)
    lease.renewed(0)
    assert lease.may_write(2_999)
    assert not lease.may_write(3_000)
    assert not lease.is_over(4_999)
    assert lease.is_over(5_000)


def test_a_lease_that_is_over_never_comes_back() -> None:
    lease = Lease(5_000)
    lease.renewed(0)
    assert lease.is_over(6_000)
    assert not lease.renewed(5_900)
    assert lease.is_over(5_901)
    assert lease.remaining_ms(5_901) == 0


def test_an_answer_that_comes_out_of_order_takes_nothing_back() -> None:
    lease = Lease(5_000)
    lease.renewed(2_000)
    lease.renewed(1_000)
    assert lease.remaining_ms(2_000) == 5_000


@given(
    lease_ms=st.integers(200, 10_000),
    steps=st.lists(st.tuples(st.integers(0, 4_000), st.booleans()), max_size=30),
)
def test_it_never_writes_under_a_lease_that_another_could_see_dead(
    lease_ms: int, steps: list[tuple[int, bool]]
) -> None:
    """Whoever watches the lease counts from the last renewal's arrival, which is after its send."""
    lease = Lease(lease_ms)
    now_ms, last_sent_ms, is_over = 0, None, False
    for passed_ms, renews in steps:
        now_ms += passed_ms
        if renews and lease.renewed(now_ms):
            assert not is_over
            last_sent_ms = now_ms
        if lease.may_write(now_ms):
            assert last_sent_ms is not None
            assert now_ms - last_sent_ms < lease_ms
        is_over = is_over or lease.is_over(now_ms)
        assert lease.is_over(now_ms) == is_over
