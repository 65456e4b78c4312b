//! What engines of any format need.
//!
//! | module | what it holds |
//! |---|---|
//! | [`sync`] | locks, and the same ones under the model checker |
//! | [`counter`] | sums that must not fall below zero, and what ends writing when one would |
//! | [`ranges`] | sets of ranges |
//! | [`cores`] | the CPUs that an engine's threads run on |
//! | [`shared`] | what all threads share: locks that are counted, and cache lines |
//! | [`spread`] | a lock for what many threads read and few change |
//! | [`workers`] | threads for computations, one for each core |

pub mod cores;
pub mod counter;
pub mod ranges;
pub mod shared;
pub mod spread;
pub mod sync;
pub mod workers;
