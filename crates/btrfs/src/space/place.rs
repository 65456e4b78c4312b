//! A place in line: what is to be put right when somebody leaves it, whatever happens to him.

use std::sync::Arc;

use super::ledger::Ledger;
use super::tickets::{Demand, Outcome, Waiter};

/// A place in line, until this is dropped. What was granted and not taken is then given back.
pub(super) struct PlaceInLine<'l> {
    ledger: &'l Ledger,
    demand: Demand,
    waiter: Arc<Waiter>,
    has_taken: bool,
}

/// What there is to do for who waited.
pub(super) enum Turn<'l> {
    /// To take what was granted, or to go away.
    Ended(Outcome),
    /// To make room for all.
    Leads(Leading<'l>),
}

/// To make room for all who wait, until this is dropped.
pub(super) struct Leading<'l> {
    ledger: &'l Ledger,
    pub(super) waiter: Arc<Waiter>,
}

impl<'l> PlaceInLine<'l> {
    /// Joins the line at the end.
    pub(super) fn join(ledger: &'l Ledger, demand: Demand) -> Self {
        let mut line = ledger.line();
        let waiter = line.join(demand);
        ledger.note_waiting(&line);
        drop(line);
        Self { ledger, demand, waiter, has_taken: false }
    }

    /// Whether the ticket was granted.
    pub(super) fn is_granted(&self) -> bool {
        self.waiter.outcome() == Some(Outcome::Granted)
    }

    /// Waits until the ticket has come to its end, or nobody leads.
    pub(super) fn wait(&mut self) -> Turn<'l> {
        let mut line = self.ledger.line();
        loop {
            if let Some(outcome) = self.waiter.outcome() {
                self.has_taken = true;
                return Turn::Ended(outcome);
            }
            if !line.is_led {
                line.is_led = true;
                return Turn::Leads(Leading { ledger: self.ledger, waiter: self.waiter.clone() });
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
