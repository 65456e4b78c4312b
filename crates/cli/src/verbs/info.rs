//! `offshoot info`: shows what a volume is, and the disk that holds it.

use std::io::Write;
use std::sync::Arc;

use super::disk_info::DiskInfo;
use super::{btrfs, xfs};
use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::{Console, write_line};
use crate::session::AnySession;

pub(super) fn run(
    InfoArguments { volume, json }: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let disk = DiskInfo::read(volume)?;
    if !disk.has_volume {
        return if *json { Ok(write_line(out, &disk)?) } else { disk.print(out) };
    }
    match AnySession::open_stored(volume, console)? {
        AnySession::Btrfs(session) => btrfs::info::show(&session, disk, *json, out, console),
        AnySession::Xfs(session) => xfs::info::show(&session, disk, *json, out, console),
    }
}
