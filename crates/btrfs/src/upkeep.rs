//! Upkeep: what a volume needs so that operations go on, and that no operation asked for.
//!
//! It makes room for those who wait for space ([`MakesRoom`](crate::space::MakesRoom)), has chunks
//! come and go, and discards what is free. It calls all rooms; none of them knows it.

mod chunks;
mod discard;
mod join;
mod reclaim;

pub use discard::Trimmed;
#[cfg(test)]
pub(crate) use reclaim::ask_for_commit;
