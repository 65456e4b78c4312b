//! Upkeep: what a volume needs so that operations go on, and that no operation asked for.
//!
//! It decides when to commit, makes room for those who wait for space
//! ([`MakesRoom`](crate::space::MakesRoom)), has chunks come and go, and discards what is free. It
//! calls all rooms below, and no room below names it.

mod chunks;
mod commit;
mod committer;
mod discard;
mod join;
mod reclaim;

pub(crate) use committer::Committer;
#[cfg(test)]
pub(crate) use reclaim::ask_for_commit;
