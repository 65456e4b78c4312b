//! A place in the line, and the clean-up when its thread leaves the line, also by a panic.

use std::sync::Arc;

use super::ledger::Ledger;
use super::tickets::{Demand, TicketOutcome, Waiter};

/// A place in the line, until it is dropped. Dropping it gives back space that was granted and not
/// taken.
pub(super) struct PlaceInLine<'l> {
    ledger: &'l Ledger,
    demand: Demand,
    waiter: Arc<Waiter>,
    has_taken: bool,
}

/// What a thread in the line does next.
pub(super) enum TurnInLine<'l> {
    /// Take the granted space, or leave.
    Ended(TicketOutcome),
    /// Make room for all tickets.
    Leads(Leading<'l>),
}

/// The role of the leader, until it is dropped.
pub(super) struct Leading<'l> {
    ledger: &'l Ledger,
    pub(super) waiter: Arc<Waiter>,
}

impl<'l> PlaceInLine<'l> {
    /// Joins the line at the end of its class.
    pub(super) fn join(ledger: &'l Ledger, demand: Demand) -> Self {
        let mut line = ledger.line();
        let waiter = line.join(demand);
        ledger.note_waiting(&line);
        drop(line);
        Self { ledger, demand, waiter, has_taken: false }
    }

    /// Whether the ticket was granted.
    pub(super) fn is_granted(&self) -> bool {
        self.waiter.outcome() == Some(TicketOutcome::Granted)
    }

    /// Waits until the ticket has ended, or there is no leader.
    pub(super) fn wait(&mut self) -> TurnInLine<'l> {
        let mut line = self.ledger.line();
        loop {
            if let Some(outcome) = self.waiter.outcome() {
                self.has_taken = true;
                return TurnInLine::Ended(outcome);
            }
            if !line.is_led {
                line.is_led = true;
                return TurnInLine::Leads(Leading {
                    ledger: self.ledger,
                    waiter: self.waiter.clone(),
                });
            }
            self.waiter.wait(&mut line);
        }
    }
}

impl Drop for PlaceInLine<'_> {
    fn drop(&mut self) {
        let mut line = self.ledger.line();
        let was_waiting = self.waiter.outcome().is_none() && line.leave(&self.waiter);
        if !was_waiting && !self.has_taken && self.is_granted() {
            self.ledger.take_back(self.demand);
        }
        self.ledger.note_waiting(&line);
        line.wake_leader();
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        self.ledger.line().is_led = false;
    }
}
