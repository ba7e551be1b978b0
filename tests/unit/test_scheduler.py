"""The queue, with literals: who starts, who waits, and why."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from server.controller.actions import Delete, Explain, Start, Sweep
from server.controller.cluster import AttemptState, ClusterState, Node, RankState
from server.controller.scheduler import plan
from server.controller.snapshot import AttemptFacts, JobFacts, Policy, RankFacts, Snapshot
from server.states import AttemptStatus, Desired, Status
from workers.contract import AttemptId, JobId

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def seconds(count: float) -> datetime:
    return NOW + timedelta(seconds=count)


def job(name: str, ranks: int = 2, *, after: float = 0, **changes: object) -> JobFacts:
    facts = JobFacts(
        id=JobId(name),
        status=Status.QUEUED,
        desired=Desired.RUN,
        priority=50,
        queued_at=seconds(after),
        ranks=ranks,
        device="auto",
        stop_grace_seconds=30.0,
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def node(slots: int, free: int | None = None, *, device: str = "cpu", alive: bool = True, name: str = "n") -> Node:
    return Node(name, "10.0.0.1", alive, device, slots, slots if free is None else free, 0, 0)  # type: ignore[arg-type]


def attempt(name: str, of: str, ranks: int, device: str = "cpu") -> AttemptFacts:
    facts = tuple(RankFacts(r, phase="training", step=1) for r in range(ranks))
    return AttemptFacts(AttemptId(name), JobId(of), 1, AttemptStatus.RUNNING, device, NOW, facts, launched_at=NOW)


def look(*jobs: JobFacts, nodes: tuple[Node, ...] = (node(2),), **facts: object) -> Snapshot:
    states = tuple(
        AttemptState(a.id, a.job_id, 1, tuple(RankState(r.rank, "running") for r in a.ranks))
        for a in facts.get("attempts", ())  # type: ignore[attr-defined]
    )
    fields: dict[str, object] = {"attempts": (), "cluster": ClusterState(nodes, states), **facts}
    return Snapshot(jobs=jobs, **fields)  # type: ignore[arg-type]


def started(snapshot: Snapshot) -> list[str]:
    return [c.job_id for c in plan(snapshot, NOW) if isinstance(c, Start)]


def reasons(snapshot: Snapshot) -> dict[str, str]:
    return {c.job_id: c.reason for c in plan(snapshot, NOW) if isinstance(c, Explain)}


def test_two_gangs_that_do_not_fit_together_never_hold_half_each() -> None:
    """Two jobs of two on two slots: the first starts whole, the second holds nothing and says why."""
    snapshot = look(job("a"), job("b", after=1))
    assert started(snapshot) == ["a"]
    assert reasons(snapshot) == {"b": "waiting_for_slots"}


def test_equal_priorities_start_strictly_in_the_order_of_submit() -> None:
    """First in, first out; the id only decides equal times."""
    jobs = [job(f"j{n}", 1, after=9 - n) for n in range(10)]
    assert started(look(*jobs, nodes=(node(3),))) == ["j9", "j8", "j7"]


def test_a_higher_number_is_a_higher_priority() -> None:
    """Stated once here, and in the field's description."""
    assert started(look(job("old"), job("urgent", after=100, priority=51))) == ["urgent"]


def test_a_job_larger_than_the_cluster_waits_with_the_numbers_and_blocks_nobody() -> None:
    """64 wanted, 2 there: `no_capacity` names both, and the small job behind it starts."""
    snapshot = look(job("huge", 64), job("small", 2, after=1))
    assert started(snapshot) == ["small"]
    (why,) = [c for c in plan(snapshot, NOW) if isinstance(c, Explain)]
    assert (why.reason, why.data) == ("no_capacity", {"ranks": 64, "device": "cpu", "total": 2})


def test_a_big_job_is_not_starved_by_small_ones() -> None:
    """One slot is free and a job of four is ahead: the slot is kept for it, and the small one says that it waits."""
    running = attempt("r", "running", 3)
    snapshot = look(
        job("running", 3, status=Status.RUNNING),
        job("big", 4),
        job("small", 1, after=1),
        nodes=(node(4, 1),),
        attempts=(running,),
        adopted=frozenset({running.id}),
    )
    assert started(snapshot) == []
    assert reasons(snapshot) == {"big": "waiting_for_slots", "small": "reserved"}


def test_a_long_line_is_not_explained_again_when_its_head_changes() -> None:
    """Of a thousand jobs in line only the one that comes to the front gets another reason."""
    held = {"ranks": 1, "device": "cpu"}
    line = [job(f"j{n}", 1, after=n, reason="reserved", reason_data=held) for n in range(1000)]
    assert list(reasons(look(*line, nodes=(node(2, 0),)))) == ["j0"]


def test_slots_of_another_device_are_not_held_by_a_waiting_job() -> None:
    """A job that waits for GPUs does not keep CPU slots idle."""
    nodes = (node(2), node(2, 0, device="cuda", name="g"))
    snapshot = look(job("gpu", 2, device="cuda"), job("cpu", 2, device="cpu", after=1), nodes=nodes)
    assert started(snapshot) == ["cpu"]


def test_auto_takes_gpus_when_there_are_enough_of_them_in_all() -> None:
    """It waits for GPUs that are busy rather than train a GPU-sized job on CPU; without any it takes CPU slots."""
    busy = (node(4), node(2, 0, device="cuda", name="g"))
    assert started(look(job("a", 2), nodes=busy)) == []
    free = (node(4), node(2, device="cuda", name="g"))
    assert [c.device for c in plan(look(job("a", 2), nodes=free), NOW) if isinstance(c, Start)] == ["cuda"]
    assert [c.device for c in plan(look(job("a", 2)), NOW) if isinstance(c, Start)] == ["cpu"]


def test_a_lost_node_is_not_chosen() -> None:
    """Its slots count neither as free nor as there."""
    snapshot = look(job("a", 2), nodes=(node(2, alive=False),))
    assert started(snapshot) == []
    assert reasons(snapshot) == {"a": "no_capacity"}


def test_our_own_book_counts_when_the_cluster_has_not_yet_seen_a_launch() -> None:
    """The cluster says two free, but an attempt of ours holds them: nothing starts twice."""
    holder = attempt("r", "running", 2)
    snapshot = look(
        job("running", status=Status.RUNNING),
        job("next", after=1),
        nodes=(node(2, 2),),
        attempts=(holder,),
        launching=frozenset({holder.id}),
    )
    assert started(snapshot) == []


def test_a_quota_holds_back_what_the_slots_would_allow() -> None:
    """Two jobs of two under a quota of two: the second waits with reason `quota`."""
    snapshot = look(job("a"), job("b", after=1), nodes=(node(8),), policy=Policy(quota_slots=2))
    assert started(snapshot) == ["a"]
    assert reasons(snapshot) == {"b": "quota"}


def test_a_job_in_backoff_lets_others_pass_but_keeps_its_place() -> None:
    """It holds nothing while it may not start; once it may, it is the first again."""
    waiting = job("old", not_before=seconds(30))
    snapshot = look(waiting, job("new", after=1))
    assert started(snapshot) == ["new"]
    assert reasons(snapshot) == {"old": "backoff"}
    assert started(look(replace(waiting, not_before=seconds(0)), job("new", after=1))) == ["old"]


def test_an_explanation_is_written_once_per_change() -> None:
    """An infeasible job that is looked at again and again causes no further line."""
    data = {"ranks": 64, "device": "cpu", "total": 2}
    assert plan(look(job("huge", 64, reason="no_capacity", reason_data=data)), NOW) == []


def test_while_the_cluster_is_away_nothing_starts_and_everybody_says_so() -> None:
    """And nothing that runs is touched."""
    running = attempt("r", "running", 2)
    snapshot = look(
        job("running", status=Status.RUNNING), job("a"), cluster=None, cluster_error="gone", attempts=(running,)
    )
    assert plan(snapshot, NOW) == [Explain(JobId("a"), Status.QUEUED, "cluster_unavailable", {"message": "gone"})]


def test_a_stopping_server_starts_nothing() -> None:
    """Draining leaves the queue as it is."""
    assert plan(look(job("a"), draining=True), NOW) == []


def test_a_finished_job_is_never_started() -> None:
    """Only what is queued is looked at, whatever the cluster says."""
    ended = [job(s.value, status=s) for s in Status if s not in (Status.QUEUED, Status.DELETING)]
    assert started(look(*ended)) == []


def test_a_deleting_job_is_deleted_again_until_it_is_gone() -> None:
    """So that a deletion cut short goes on after a restart."""
    assert plan(look(job("a", status=Status.DELETING)), NOW) == [Delete(JobId("a"))]


def test_an_attempt_that_the_database_does_not_know_is_removed_after_a_while() -> None:
    """Not at once: the row may be on its way."""
    stranger = AttemptState(AttemptId("x"), JobId("gone"), 1, (RankState(0, "running"),))
    cluster = ClusterState((node(2),), (stranger,))
    fresh = Snapshot((), (), cluster, unknown_since={AttemptId("x"): seconds(-29)})
    assert plan(fresh, NOW) == []
    old = replace(fresh, unknown_since={AttemptId("x"): seconds(-30)})
    assert plan(old, NOW) == [Sweep(AttemptId("x"), JobId("gone"))]


def test_silence_is_shown_and_taken_back() -> None:
    """No sign of life for long: said on the job, which stays running; a sign: taken back, unless the end is decided."""
    running = attempt("r", "a", 1)
    silent = AttemptState(running.id, JobId("a"), 1, (RankState(0, "running", "n", heartbeat_age_seconds=31.0),))
    facts = {"attempts": (running,), "adopted": frozenset({running.id})}
    shown = look(job("a", 1, status=Status.RUNNING), **facts, cluster=ClusterState((node(2),), (silent,)))  # type: ignore[arg-type]
    assert reasons(shown) == {"a": "unreachable"}
    back = look(job("a", 1, status=Status.RUNNING, reason="unreachable"), **facts)  # type: ignore[arg-type]
    assert reasons(back) == {"a": "running"}
    decided = facts | {"attempts": (replace(running, reason="no_progress"),)}
    assert reasons(look(job("a", 1, status=Status.RUNNING, reason="unreachable"), **decided)) == {}  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(0, 5)), max_size=12),
    slots=st.integers(0, 8),
    used=st.integers(0, 8),
    quota=st.integers(0, 8),
)
def test_no_plan_ever_gives_out_more_than_there_is(
    sizes: list[tuple[int, int, int]], slots: int, used: int, quota: int
) -> None:
    """Starts fit into free slots and quota, each queued job starts or has a reason, and none passes a job that fits."""
    jobs = [job(f"j{n}", ranks, priority=p, after=t) for n, (ranks, p, t) in enumerate(sizes)]
    free = max(slots - used, 0)
    snapshot = look(*jobs, nodes=(node(slots, free),), policy=Policy(quota_slots=quota))
    commands = plan(snapshot, NOW)
    starting = {c.job_id for c in commands if isinstance(c, Start)}
    assert starting | reasons(snapshot).keys() == {j.id for j in jobs}
    assert not starting & reasons(snapshot).keys()
    taken = sum(j.ranks for j in jobs if j.id in starting)
    assert taken <= free
    assert not quota or taken <= quota
    order = sorted(jobs, key=lambda j: (-j.priority, j.queued_at, j.id))
    feasible = [j for j in order if j.ranks <= slots and (not quota or j.ranks <= quota)]
    first_waiting = next((n for n, j in enumerate(feasible) if j.id not in starting), len(feasible))
    assert all(j.id not in starting for j in feasible[first_waiting:])
