//! How data that is written is stored, as options of verbs and as mount options.

use clap::Args;
use offshoot_btrfs::{Compress, EngineOptions, NewFiles};
use offshoot_btrfs_format::compress::CompressionMethod;

use crate::exit::{Result, VerbFailure};
use crate::mount::{name_and_value, number};

/// How data that is written is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Storing {
    /// The compression of written data.
    pub(crate) compress: Option<Compress>,
    /// How the data of new files is stored.
    new_files: NewFiles,
    /// The largest file that is kept in its extent item, in bytes; `None` for the usual one.
    max_inline: Option<u64>,
}

impl Storing {
    /// What is worth it is compressed by the method.
    pub(crate) fn compressed(method: Option<CompressionMethod>) -> Self {
        let compress = method.map(|method| Compress { method, is_forced: false });
        Self { compress, ..Self::default() }
    }

    /// Follows the mount option `option`. Returns false if it is about something else.
    ///
    /// # Errors
    /// When its value is wrong.
    pub(crate) fn add(&mut self, option: &str) -> Result<bool> {
        let (name, value) = name_and_value(option);
        match (name, value) {
            ("compress" | "compression", value) => self.compress(compress(option, value, false)?),
            ("compress-force", value) => self.compress(compress(option, value, true)?),
            ("nodatacow", None) => {
                self.new_files = NewFiles::InPlace;
                self.compress = None;
            }
            ("nodatasum", None) if self.new_files == NewFiles::Copied => {
                self.new_files = NewFiles::WithoutChecksums;
            }
            // NODATACOW implies no checksums, and that remains when `datacow` takes NODATACOW back.
            ("datacow", None) if self.new_files == NewFiles::InPlace => {
                self.new_files = NewFiles::WithoutChecksums;
            }
            ("nodatasum" | "datacow", None) => {}
            ("datasum", None) => self.new_files = NewFiles::Copied,
            ("max_inline", Some(value)) => self.max_inline = Some(size(option, value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Sets the compression. Compressed data has checksums and is never overwritten in place, so
    /// the last of such options wins, as for the kernel.
    fn compress(&mut self, compress: Option<Compress>) {
        self.compress = compress;
        if compress.is_some() {
            self.new_files = NewFiles::Copied;
        }
    }

    /// Sets the options of the engine.
    pub(crate) fn apply_to(self, options: &mut EngineOptions) {
        options.compress = self.compress;
        options.new_files = self.new_files;
        if let Some(bytes) = self.max_inline {
            options.max_inline = bytes;
        }
    }
}

/// Parses a size in bytes, which may end with a unit.
fn size(option: &str, value: &str) -> Result<u64> {
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &value[digits.len()..] {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        _ => return number(option, value),
    };
    Ok(number::<u64>(option, digits)?.saturating_mul(1 << shift))
}

fn compress(option: &str, value: Option<&str>, is_forced: bool) -> Result<Option<Compress>> {
    if matches!(value, Some("no" | "none")) {
        return Ok(None);
    }
    let method = value.unwrap_or("zlib").parse();
    method
        .map(|method| Some(Compress { method, is_forced }))
        .map_err(|reason| VerbFailure::Usage(format!("{option}: {reason}")))
}

/// How data is stored that a verb writes, as the mount options of these names have it. Each rules
/// out the others: what is compressed has checksums.
#[derive(Args)]
#[group(multiple = false)]
pub(crate) struct StoringArguments {
    /// Compress what is written: zlib, lzo or zstd, with a level as in zstd:3
    #[arg(long, value_name = "METHOD", value_parser = parse_compression)]
    compress: Option<Compress>,
    /// The same also for files that do not look as if it were worth it
    #[arg(long, value_name = "METHOD", value_parser = parse_forced_compression)]
    compress_force: Option<Compress>,
    /// Store new files without checksums, and not compressed
    #[arg(long)]
    nodatasum: bool,
    /// Store new files so that they are overwritten in place, without checksums, and not compressed
    #[arg(long)]
    nodatacow: bool,
}

impl StoringArguments {
    /// What the options say.
    pub(crate) fn chosen(&self) -> Storing {
        let new_files = match self {
            Self { nodatacow: true, .. } => NewFiles::InPlace,
            Self { nodatasum: true, .. } => NewFiles::WithoutChecksums,
            _ => NewFiles::Copied,
        };
        let compress = self.compress.or(self.compress_force);
        Storing { compress, new_files, max_inline: None }
    }

    /// The option that was given, if any.
    pub(crate) fn given(&self) -> Option<&'static str> {
        match self {
            Self { compress: Some(_), .. } => Some("--compress"),
            Self { compress_force: Some(_), .. } => Some("--compress-force"),
            Self { nodatasum: true, .. } => Some("--nodatasum"),
            Self { nodatacow: true, .. } => Some("--nodatacow"),
            _ => None,
        }
    }
}

fn parse_compression(text: &str) -> Result<Compress, String> {
    Ok(Compress { method: text.parse()?, is_forced: false })
}

fn parse_forced_compression(text: &str) -> Result<Compress, String> {
    Ok(Compress { method: text.parse()?, is_forced: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Storing {
        let mut storing = Storing::default();
        for option in options.split(',') {
            assert!(storing.add(option).expect("its value is right"), "{option}");
        }
        storing
    }

    #[test]
    fn the_last_of_options_that_rule_each_other_out_wins() {
        let stored = |options| {
            let storing = parse(options);
            (storing.new_files, storing.compress.is_some())
        };
        assert_eq!(stored("compress=zstd,nodatacow"), (NewFiles::InPlace, false));
        assert_eq!(stored("nodatacow,nodatasum"), (NewFiles::InPlace, false));
        assert_eq!(stored("nodatacow,datacow"), (NewFiles::WithoutChecksums, false));
        assert_eq!(stored("nodatacow,datasum"), (NewFiles::Copied, false));
        assert_eq!(stored("nodatacow,compress=zstd"), (NewFiles::Copied, true));
        let inline = |options| parse(options).max_inline;
        assert_eq!(["max_inline=0", "max_inline=4k"].map(inline), [Some(0), Some(4096)]);
    }
}
