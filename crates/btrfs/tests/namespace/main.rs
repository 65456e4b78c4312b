//! Names, attributes and data as the engine changes them, judged from outside.
//!
//! | module | what is judged |
//! |---|---|
//! | `model` | random operations on many threads against the model, the check and the kernel |
//! | `allocate` | space that is preallocated, punched, zeroed and moved, as the kernel does it |
//! | `compress` | data that is compressed |
//! | `compress_alike` | the kernel compresses the same beside us |
//! | `copies` | copies of ranges, whose holes stay holes |
//! | `data` | where data goes, and that accepted data is there |
//! | `decoded` | parts of compressed extents, which are decoded once |
//! | `readers` | reads beside writes, truncations and commits return only what was written |
//! | `background` | what a volume does by itself, and how much memory it takes |
//! | `layout` | where the sectors of a file are |
//! | `full` | full volumes: what was accepted is there, and can be removed |
//! | `limits` | hash collisions, many links, long attributes and targets: as far as the kernel goes |
//! | `together` | small new files that are written back together, and other files beside them |
//! | `twins` | access control lists, flags, exchanges, files without names, shared space: the kernel does the same beside us |
//! | `removal` | removed files leave nothing behind; orphans; snapshots stay as they are |
//! | `share` | ranges that files share, as the kernel shares them |
//! | `refusals` | impossible operations fail as POSIX requires, and change nothing |

mod allocate;
mod background;
mod common;
mod compress;
mod compress_alike;
mod copies;
mod data;
mod decoded;
mod full;
mod layout;
mod limits;
mod model;
mod readers;
mod refusals;
mod removal;
mod share;
#[path = "../shared/shown.rs"]
mod shown;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod together;
mod twins;
