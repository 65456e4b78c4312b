//! What engines of any format need.
//!
//! | module | what it holds |
//! |---|---|
//! | [`sync`] | locks, and the same ones under the model checker |
//! | [`counter`] | sums that must not fall below zero, and what ends writing when one would |
//! | [`ranges`] | sets of ranges |
//! | [`shards`] | shards of tables |
//! | [`read_ahead`] | what a sequential reader will want next |
//! | [`cores`] | the CPUs that an engine's threads run on |
//! | [`device_size`] | a device gets longer |
//! | [`lanes`] | threads that keep several devices busy at a time, for each volume |
//! | [`new_volume`] | what making a volume does with its device: wiping, refusing what is in use |
//! | [`pages`] | bytes in memory that direct I/O takes without a copy |
//! | [`runs`] | bytes of a file that are only in memory |
//! | [`shared`] | what all threads share: locks that are counted, and cache lines |
//! | [`spread`] | a lock for a value that all threads read and few threads change |
//! | [`workers`] | threads for computations, one for each core |

pub mod cores;
pub mod counter;
pub mod device_size;
pub mod lanes;
pub mod new_volume;
pub mod pages;
pub mod ranges;
pub mod read_ahead;
pub mod runs;
pub mod shards;
pub mod shared;
pub mod spread;
pub mod sync;
pub mod workers;
