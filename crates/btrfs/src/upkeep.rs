//! Upkeep: the work that keeps a volume usable and that no single operation asks for.
//!
//! It decides when to commit, makes room for the threads that wait for space
//! ([`MakesRoom`](crate::space::MakesRoom)), allocates and removes chunks, and discards free space.
//! It calls all rooms below, and no room below names it.

mod chunks;
mod commit;
mod committer;
mod discard;
mod join;
mod reclaim;

pub(crate) use committer::Committer;
#[cfg(test)]
pub(crate) use reclaim::ask_for_commit;
