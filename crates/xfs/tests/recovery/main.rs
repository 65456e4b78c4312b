//! Recovery: what we make of logs, against what the kernel makes of a copy.
//!
//! | module | what it holds |
//! |---|---|
//! | `crashed` | volumes that were not unmounted, and the verdict |
//! | `kinds` | all kinds of volumes, after a shutdown and under load |
//! | `cuts` | logs that end anywhere, and recoveries that do |
//! | `intents` | chains of intents that the end of a log cuts |
//! | `attributes` | changes of attributes and parent pointers that the end of a log cuts |
//! | `exchange` | exchanges of contents that the end of a log cuts |
//! | `finished` | unlinked inodes; finishing that is cut itself |
//! | `beyond` | logs that the kernel does not recover |
//! | `log_on_disk` | reading, changing and adding records |
//! | `log_ends` | where a log may end, and what that leaves to do |
//! | `made` | logs that were made or changed by hand |
//! | `hostile` | logs that say anything |
//! | `served` | devices of ours as files, for the kernel |
//! | `recorded` | every state that a power cut can leave of what the kernel wrote |
//!
//! `OFFSHOOT_ROUNDS` makes a campaign of what takes samples.

mod attributes;
mod beyond;
mod crashed;
mod cuts;
mod exchange;
mod finished;
mod hostile;
mod intents;
mod kinds;
mod log_ends;
mod log_on_disk;
mod made;
mod recorded;
mod served;
