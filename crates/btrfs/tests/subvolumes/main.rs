//! Subvolumes and snapshots as the engine makes and deletes them, before its judges.
//!
//! | module | what is judged |
//! |---|---|
//! | `same` | what ours makes is what the kernel makes of the same calls |
//! | `dropping` | deleted subvolumes go with all that is theirs, whoever goes on after whom |
//! | `moments` | a snapshot among many writers shows one moment |
//! | `refusals` | what cannot be done fails as it does in the kernel, and changes nothing |

mod common;
mod dropping;
mod moments;
mod refusals;
mod same;
