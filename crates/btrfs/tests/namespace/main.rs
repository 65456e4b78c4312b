//! Names and attributes as the engine changes them, before its judges.
//!
//! | module | what is judged |
//! |---|---|
//! | `model` | random operations on many threads against the model, the check and the kernel |
//! | `data` | where data goes, and that what was accepted is there |
//! | `readers` | reads beside writes, cuts and commits: nothing but what was written is read |
//! | `background` | what a volume does by itself, and what it has in memory |
//! | `full` | volumes without space: what was accepted is there, and can be removed |
//! | `limits` | hash collisions, many links, long attributes and targets: as far as the kernel goes |
//! | `twins` | access control lists, flags, exchanges, files without names: the kernel does the same beside us |
//! | `removal` | files with data go with all that is theirs; orphans; snapshots stay as they are |
//! | `refusals` | what cannot be done fails as POSIX has it, and changes nothing |

mod background;
mod common;
mod data;
mod full;
mod limits;
mod model;
mod readers;
mod refusals;
mod removal;
mod twins;
