//! `offshoot dump chunks`: shows which range of logical addresses is where on which device.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::Chunk;

use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::{Console, JsonArray, human_size};
use crate::session::Session;
use crate::verbs::fields::Fields;

pub(super) fn run(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = Session::open_stored(&arguments.volume, console)?;
    if arguments.json {
        let mut array = JsonArray::new(out)?;
        for chunk in session.volume.chunks() {
            array.push(&fields(&chunk))?;
        }
        return Ok(array.finish()?);
    }
    for chunk in session.volume.chunks() {
        writeln!(
            out,
            "{:>16} {:>10}  {} {}",
            chunk.start.0,
            human_size(chunk.length),
            chunk.flags.kind(),
            chunk.profile
        )?;
        for stripe in &chunk.stripes {
            writeln!(
                out,
                "{:>16}   device {} at {} ({})",
                "", stripe.device, stripe.physical, stripe.device_uuid
            )?;
        }
    }
    Ok(())
}

/// A chunk with its stripes.
pub(super) fn fields(chunk: &Chunk) -> Fields {
    let stripes: Vec<Fields> = chunk
        .stripes
        .iter()
        .map(|stripe| {
            Fields::default()
                .with("devid", stripe.device.0)
                .with("offset", stripe.physical.0)
                .with("dev_uuid", stripe.device_uuid.to_string())
        })
        .collect();
    Fields::default()
        .with("logical", chunk.start.0)
        .with("length", chunk.length)
        .with("holds", chunk.flags.kind())
        .with("profile", chunk.profile.to_string())
        .with("type", chunk.flags.0)
        .with("stripes", stripes)
}
