//! Names and attributes as the engine changes them, before its judges.
//!
//! | module | what is judged |
//! |---|---|
//! | `model` | random operations on many threads against the model, the check and the kernel |
//! | `allocate` | space that is preallocated, punched, zeroed and moved, as the kernel does it |
//! | `compress` | data that is compressed |
//! | `compress_alike` | the kernel compresses the same beside us |
//! | `data` | where data goes, and that what was accepted is there |
//! | `readers` | reads beside writes, cuts and commits: nothing but what was written is read |
//! | `background` | what a volume does by itself, and what it has in memory |
//! | `layout` | where the sectors of a file are |
//! | `full` | volumes without space: what was accepted is there, and can be removed |
//! | `limits` | hash collisions, many links, long attributes and targets: as far as the kernel goes |
//! | `together` | small new files that are written back together, and all others beside them |
//! | `twins` | access control lists, flags, exchanges, files without names, shared space: the kernel does the same beside us |
//! | `removal` | files with data go with all that is theirs; orphans; snapshots stay as they are |
//! | `share` | ranges that files share, as the kernel shares them |
//! | `refusals` | what cannot be done fails as POSIX has it, and changes nothing |

mod allocate;
mod background;
mod common;
mod compress;
mod compress_alike;
mod data;
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
