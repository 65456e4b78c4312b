//! Tests of the log.
//!
//! | module | what it proves |
//! |---|---|
//! | `blocks` | the items of the tests: blocks with a header, on volumes with small logs |
//! | `cut` | what a power cut leaves, recovered by us |
//! | `judged` | logs of ours, recovered and continued by the kernel |
//! | `gathered` | contexts: vectors, relogging, whiteouts |
//! | `freed` | blocks that are freed while they are on their way home |
//! | `room` | full logs: who waits, and that nobody fails |

mod blocks;
mod cut;
mod freed;
mod gathered;
mod judged;
mod room;
