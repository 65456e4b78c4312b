//! Tickets: the wait queue for space.
//!
//! A demand that does not fit, or that comes while others wait, is first retried a few times
//! (`reserve`). If it still fails, it becomes a *ticket* in the line of its kind of space. The line
//! has two classes, and each is first in, first out:
//!
//! | class | callers |
//! |---|---|
//! | priority | operations that make room, or that finish accepted work: removals, truncation, write-back |
//! | normal | all other work |
//!
//! 1. A demand gets no space while a ticket of its class or of a higher one waits, however small
//!    the demand is.
//! 2. Tickets are granted from the front, and only until the first one that does not fit.
//! 3. When a cycle of making room helped no ticket, the oldest ticket of the highest class is
//!    refused. The tickets behind it are granted if they fit. A ticket that came during the cycle
//!    is not refused, because the next cycle may find something for it.
//! 4. One of the waiting threads is the *leader*: it makes room for all (`upkeep/reclaim`). A
//!    thread that leaves a line without a leader wakes the thread at the front. That thread becomes
//!    the leader, or it has been granted its ticket, and wakes the next one when it leaves.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, MutexGuard};

/// The purpose of an operation. It decides how much of the reserve the operation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Work that may be refused.
    Work,
    /// Work that makes room, except where a snapshot keeps the blocks that it copies.
    MakesRoom,
    /// Work that makes room in any case: deleting and dropping subvolumes, and chunks.
    LastResort,
    /// Write-back of accepted data.
    WritesBack,
}

impl Claim {
    fn class(self) -> usize {
        usize::from(!self.is_first())
    }

    /// Whether it is of the priority class.
    pub(super) fn is_first(self) -> bool {
        match self {
            Self::MakesRoom | Self::LastResort | Self::WritesBack => true,
            Self::Work => false,
        }
    }
}

/// A number of bytes for a purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(super) claim: Claim,
    /// Whether a promise for later is wanted, not a reservation.
    pub(super) is_promise: bool,
    pub(crate) bytes: u64,
}

impl Demand {
    /// A demand for a reservation.
    pub(super) fn new(claim: Claim, bytes: u64) -> Self {
        Self { claim, is_promise: false, bytes }
    }

    /// A demand for a promise.
    pub(super) fn promise(bytes: u64) -> Self {
        Self { claim: Claim::Work, is_promise: true, bytes }
    }
}

/// How a ticket ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TicketOutcome {
    /// The space is reserved.
    Granted,
    /// There is no space.
    Refused,
}

/// A waiting thread.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    outcome: OnceLock<TicketOutcome>,
    wake: Condvar,
}

impl Waiter {
    /// How the ticket ended; `None` while it waits.
    pub(crate) fn outcome(&self) -> Option<TicketOutcome> {
        self.outcome.get().copied()
    }

    /// Waits until it is woken. The line is unlocked meanwhile.
    pub(super) fn wait(&self, line: &mut MutexGuard<'_, TicketLine>) {
        self.wake.wait(line);
    }
}

#[derive(Debug)]
struct Ticket {
    demand: Demand,
    /// The number of tickets that came before it.
    number: u64,
    /// The number of cycles that had begun when it came.
    after: u64,
    waiter: Arc<Waiter>,
}

impl Ticket {
    fn end(self, outcome: TicketOutcome) {
        let _ = self.waiter.outcome.set(outcome);
        self.waiter.wake.notify_one();
    }
}

/// The line for one kind of space.
#[derive(Debug, Default)]
pub(crate) struct TicketLine {
    classes: [VecDeque<Ticket>; 2],
    /// A leader makes room for all tickets.
    pub(super) is_led: bool,
    /// The number of tickets that ever joined.
    joined: u64,
    granted: u64,
    /// The number of cycles of making room that have begun.
    cycles: u64,
}

impl TicketLine {
    /// Begins a cycle of making room. Returns how many tickets were granted so far.
    pub(crate) fn begin_cycle(&mut self) -> u64 {
        self.cycles += 1;
        self.granted
    }

    /// The number of waiting tickets.
    pub(crate) fn len(&self) -> usize {
        self.classes.iter().map(VecDeque::len).sum()
    }

    /// Whether a ticket waits that comes before a new one of this claim.
    pub(super) fn is_before(&self, claim: Claim) -> bool {
        self.classes[..=claim.class()].iter().any(|class| !class.is_empty())
    }

    /// The demand of the ticket at the front.
    pub(crate) fn front(&self) -> Option<Demand> {
        self.classes.iter().find_map(VecDeque::front).map(|ticket| ticket.demand)
    }

    /// How many tickets have been granted so far.
    pub(crate) fn granted(&self) -> u64 {
        self.granted
    }

    /// Adds a ticket at the end of its class.
    pub(super) fn join(&mut self, demand: Demand) -> Arc<Waiter> {
        let waiter = Arc::<Waiter>::default();
        self.classes[demand.claim.class()].push_back(Ticket {
            demand,
            number: self.joined,
            after: self.cycles,
            waiter: waiter.clone(),
        });
        self.joined += 1;
        waiter
    }

    /// Grants tickets from the front until `grant` refuses one.
    pub(super) fn serve(&mut self, mut grant: impl FnMut(&Self, Demand) -> bool) {
        while let Some(class) = self.classes.iter().position(|class| !class.is_empty()) {
            let demand = self.classes[class][0].demand;
            if !grant(self, demand) {
                return;
            }
            if let Some(ticket) = self.classes[class].pop_front() {
                self.granted += 1;
                let is_older = |left: &Ticket| ticket.number < left.number;
                debug_assert!(self.classes[class].iter().all(is_older), "{ticket:?}: {self:?}");
                ticket.end(TicketOutcome::Granted);
            }
        }
    }

    /// Refuses the ticket at the front, if it was there when the last cycle began, and the cycle
    /// helped no ticket: `granted` is the number of granted tickets at its beginning.
    pub(crate) fn refuse_oldest(&mut self, granted: u64) {
        let cycles = self.cycles;
        let had_a_cycle = |class: &VecDeque<Ticket>| class[0].after < cycles;
        if self.granted == granted
            && let Some(class) = self.classes.iter_mut().find(|class| !class.is_empty())
            && had_a_cycle(class)
            && let Some(ticket) = class.pop_front()
        {
            ticket.end(TicketOutcome::Refused);
        }
    }

    /// Removes the ticket of a thread that leaves. Returns whether it was still there.
    pub(super) fn leave(&mut self, waiter: &Arc<Waiter>) -> bool {
        let before = self.len();
        for class in &mut self.classes {
            class.retain(|ticket| !Arc::ptr_eq(&ticket.waiter, waiter));
        }
        self.len() < before
    }

    /// Wakes the thread at the front, if there is no leader.
    pub(super) fn wake_leader(&self) {
        if !self.is_led
            && let Some(ticket) = self.classes.iter().find_map(VecDeque::front)
        {
            ticket.waiter.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(bytes: u64) -> Demand {
        Demand::new(Claim::Work, bytes)
    }

    fn removal(bytes: u64) -> Demand {
        Demand::new(Claim::MakesRoom, bytes)
    }

    /// Grants tickets from `room` bytes. Returns the rest.
    fn serve(line: &mut TicketLine, mut room: u64) -> u64 {
        line.serve(|_, demand| {
            let fits = demand.bytes <= room;
            room -= if fits { demand.bytes } else { 0 };
            fits
        });
        room
    }

    fn outcomes(waiters: &[Arc<Waiter>]) -> Vec<Option<TicketOutcome>> {
        waiters.iter().map(|waiter| waiter.outcome()).collect()
    }

    /// Refuses the oldest ticket after a cycle that helped no ticket.
    fn refuse_oldest(line: &mut TicketLine) {
        let granted = line.begin_cycle();
        line.refuse_oldest(granted);
    }

    /// Before the mend, a removal that came at the end of a cycle for other tickets was refused
    /// with them.
    #[test]
    fn who_came_during_a_cycle_is_not_refused_for_it() {
        let mut line = TicketLine::default();
        let first = line.join(work(50));
        let granted = line.begin_cycle();
        let late = line.join(removal(70));
        line.refuse_oldest(granted);
        assert_eq!((first.outcome(), late.outcome()), (None, None), "it stands before the first");
        refuse_oldest(&mut line);
        assert_eq!((first.outcome(), late.outcome()), (None, REFUSED));
        let granted = line.begin_cycle();
        let small = line.join(removal(1));
        assert_eq!(serve(&mut line, 1), 0);
        line.refuse_oldest(granted);
        assert_eq!((small.outcome(), first.outcome()), (GRANTED, None), "somebody was helped");
    }

    const GRANTED: Option<TicketOutcome> = Some(TicketOutcome::Granted);
    const REFUSED: Option<TicketOutcome> = Some(TicketOutcome::Refused);

    #[test]
    fn a_class_is_served_in_order_and_nobody_overtakes() {
        let mut line = TicketLine::default();
        let waiters = [5, 9, 1].map(|bytes| line.join(work(bytes)));
        assert_eq!(serve(&mut line, 4), 4, "the last would fit, and is not the first");
        assert_eq!(outcomes(&waiters), [None; 3]);
        assert_eq!(serve(&mut line, 10), 5);
        assert_eq!(outcomes(&waiters), [GRANTED, None, None]);
        assert!(line.is_before(Claim::Work) && !line.is_before(Claim::MakesRoom));
        assert_eq!(serve(&mut line, 10), 0);
        assert_eq!(outcomes(&waiters), [GRANTED; 3]);
        assert_eq!((line.len(), line.granted()), (0, 3));
        assert!(!line.is_before(Claim::Work));
    }

    #[test]
    fn priority_goes_first_whenever_it_came() {
        let mut line = TicketLine::default();
        let normal = line.join(work(1));
        let removals = [removal(4), Demand::new(Claim::WritesBack, 4)].map(|d| line.join(d));
        assert!(line.is_before(Claim::WritesBack));
        assert_eq!(serve(&mut line, 5), 1);
        assert_eq!(outcomes(&removals), [GRANTED, None]);
        assert_eq!(normal.outcome(), None, "what is left is for the removal that waits");
        serve(&mut line, 5);
        assert_eq!((removals[1].outcome(), normal.outcome()), (GRANTED, GRANTED));
    }

    #[test]
    fn the_oldest_is_refused_and_younger_ones_are_served() {
        let mut line = TicketLine::default();
        let waiters = [50, 60, 2].map(|bytes| line.join(work(bytes)));
        let priority = line.join(removal(70));
        refuse_oldest(&mut line);
        assert_eq!(priority.outcome(), REFUSED);
        refuse_oldest(&mut line);
        refuse_oldest(&mut line);
        assert_eq!(outcomes(&waiters), [REFUSED, REFUSED, None]);
        assert_eq!(serve(&mut line, 2), 0);
        assert_eq!(waiters[2].outcome(), GRANTED);
        refuse_oldest(&mut line);
        assert_eq!(line.len(), 0);
    }

    #[test]
    fn who_leaves_is_not_served() {
        let mut line = TicketLine::default();
        let waiters = [5, 1].map(|bytes| line.join(work(bytes)));
        assert!(line.leave(&waiters[0]));
        assert!(!line.leave(&waiters[0]), "it is gone");
        serve(&mut line, 1);
        assert_eq!(outcomes(&waiters), [None, GRANTED]);
    }

    /// Random tickets of both classes beside a list that is searched by hand.
    #[test]
    fn the_line_is_two_lists() {
        let mut random = offshoot_testkit::random::Random::new(11);
        let mut line = TicketLine::default();
        let mut lists: [Vec<(Demand, Arc<Waiter>)>; 2] = Default::default();
        for step in 0..20_000 {
            match random.below(4) {
                0 | 1 => {
                    let class = usize::from(random.below(3) > 0);
                    let claim = [Claim::MakesRoom, Claim::Work][class];
                    let demand = Demand::new(claim, 1 + random.below(9));
                    lists[class].push((demand, line.join(demand)));
                }
                2 => {
                    let mut room = random.below(20);
                    let left = serve(&mut line, room);
                    while let Some(list) = lists.iter_mut().find(|list| !list.is_empty()) {
                        if list[0].0.bytes > room {
                            break;
                        }
                        let (demand, waiter) = list.remove(0);
                        room -= demand.bytes;
                        assert_eq!(waiter.outcome(), GRANTED, "step {step}");
                    }
                    assert_eq!(left, room, "step {step}");
                }
                _ if random.below(4) == 0 => {
                    refuse_oldest(&mut line);
                    if let Some(list) = lists.iter_mut().find(|list| !list.is_empty()) {
                        assert_eq!(list.remove(0).1.outcome(), REFUSED, "step {step}");
                    }
                }
                _ => {}
            }
            assert!(lists.iter().flatten().all(|(_, waiter)| waiter.outcome().is_none()));
            assert_eq!(line.len(), lists.iter().map(Vec::len).sum::<usize>());
        }
    }
}
