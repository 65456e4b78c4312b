//! `offshoot check`: compares everything that the structures of a volume say about each other.

use std::io::Write;
use std::sync::Arc;

use offshoot_vfs::{Code, Error};

use super::dump::xfs_on;
use super::xfs;
use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::Console;
use crate::session::Access;

pub(super) fn run(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let Some(device) = xfs_on(&arguments.volume, Access::Read, console)? else {
        let what = "a check of a btrfs volume: that is for XFS so far; scrub -r verifies every copy \
                    of everything in it";
        return Err(Error::unsupported(Code::NotInFormat, what).into());
    };
    xfs::check::run(&device, arguments, out, console)
}
