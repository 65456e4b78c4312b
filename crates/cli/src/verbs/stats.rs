//! `offshoot stats`: how much of a volume is used.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::Member;
use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_vfs::{Code, Error, FileSystem};
use offshoot_xfs::XfsVolume;
use serde::Serialize;

use super::btrfs::space::{Allocation, allocations};
use super::btrfs::statistics::Statistics;
use super::statistics::XfsCounters;
use crate::args::{InfoArguments, StatsArguments};
use crate::exit::Result;
use crate::output::{Console, human_size, write_line};
use crate::session::{Access, AnySession};

const SINCE_MOUNTED: &str = "what the engine did since it was mounted";

#[derive(Serialize)]
struct StatsReport {
    size: u64,
    used: u64,
    available: u64,
    /// Bytes of the devices that belong to no block group.
    unallocated: u64,
    space: Vec<StatsKind>,
    statistics: Statistics,
}

/// One kind of space.
#[derive(Serialize)]
struct StatsKind {
    #[serde(flatten)]
    allocation: Allocation,
    /// Absent if the block group items cannot be read.
    free: Option<u64>,
}

pub(super) fn run(
    StatsArguments { info: arguments, locks }: &StatsArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = match AnySession::open_to(Access::Read, &arguments.volume, console)? {
        AnySession::Btrfs(session) => session,
        AnySession::Xfs(session) => {
            if *locks {
                return Err(Error::unsupported(
                    Code::NotInFormat,
                    "--locks: the engine of XFS counts no locks".to_owned(),
                )
                .into());
            }
            return XfsStatsReport::of(&session.volume)?.show(arguments, out);
        }
    };
    let volume = &session.volume;
    let sizes = volume.filesystem(TreeId::FS)?.statfs()?;
    let members = volume.members().iter().map(Member::total_bytes);
    let on_devices = |chunk: Chunk| chunk.stripe_bytes().saturating_mul(chunk.stripes.len() as u64);
    let allocated = volume.chunks().map(on_devices).fold(0, u64::saturating_add);
    let kind = |allocation: Allocation| {
        let free = allocation.used.map(|used| allocation.size.saturating_sub(used));
        StatsKind { allocation, free }
    };
    let report = StatsReport {
        size: sizes.total_bytes,
        used: sizes.used_bytes,
        available: sizes.available_bytes,
        unallocated: members.fold(0, u64::saturating_add).saturating_sub(allocated),
        space: allocations(volume, console).into_iter().map(kind).collect(),
        statistics: Statistics::of(volume),
    };
    if arguments.json {
        return Ok(write_line(out, &report)?);
    }
    report.print(out)?;
    if arguments.volume.open.live.is_some() {
        let statistics = if *locks { report.statistics.with_locks() } else { report.statistics };
        write!(out, "{SINCE_MOUNTED}\n{statistics}")?;
    }
    Ok(())
}

/// What is told of a volume of XFS.
#[derive(Serialize)]
struct XfsStatsReport {
    size: u64,
    used: u64,
    available: u64,
    statistics: XfsCounters,
}

impl XfsStatsReport {
    fn of(volume: &XfsVolume) -> Result<Self> {
        let sizes = volume.statfs()?;
        Ok(Self {
            size: sizes.total_bytes,
            used: sizes.used_bytes,
            available: sizes.available_bytes,
            statistics: XfsCounters::of(volume),
        })
    }

    fn show(&self, arguments: &InfoArguments, out: &mut dyn Write) -> Result {
        if arguments.json {
            return Ok(write_line(out, self)?);
        }
        let sizes = [("size", self.size), ("used", self.used), ("available", self.available)];
        sizes.into_iter().try_for_each(|(name, bytes)| size_line(out, name, bytes))?;
        if arguments.volume.open.live.is_some() {
            write!(out, "{SINCE_MOUNTED}\n{}", self.statistics)?;
        }
        Ok(())
    }
}

fn size_line(out: &mut dyn Write, name: &str, bytes: u64) -> Result {
    Ok(writeln!(out, "{name:<18} {:>10}", human_size(bytes))?)
}

impl StatsReport {
    fn print(&self, out: &mut dyn Write) -> Result {
        let or_unknown = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), human_size);
        for (name, bytes) in [
            ("size", self.size),
            ("used", self.used),
            ("available", self.available),
            ("unallocated", self.unallocated),
        ] {
            size_line(out, name, bytes)?;
        }
        writeln!(out, "{:<23} {:>10} {:>10} {:>10}", "space", "size", "used", "free")?;
        for StatsKind { allocation, free } in &self.space {
            writeln!(
                out,
                "  {:<12} {:<8} {:>10} {:>10} {:>10}",
                allocation.holds,
                allocation.profile,
                human_size(allocation.size),
                or_unknown(allocation.used),
                or_unknown(*free)
            )?;
        }
        Ok(())
    }
}
