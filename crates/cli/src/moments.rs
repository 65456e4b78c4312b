//! Points in time as users write them.

use jiff::Zoned;
use jiff::civil::{Date, DateTime, Time};
use offshoot_vfs::Timestamp;

use crate::output::zone;

/// Parses `2026-11-20`, `2026-11-20 10:30:00.5`, `2026-11-20T10:30Z`, `2026-11-20 10:30 +0100`,
/// `@1795167000`, `now`, `today` or `yesterday`. A time without a zone is in the caller's zone.
pub(crate) fn parse_time(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let text = text.trim();
    let time = || {
        if let Some(seconds) = text.strip_prefix('@') {
            return since_1970(seconds);
        }
        let today = || Some(local(now)?.datetime().date().to_datetime(Time::midnight()));
        match text {
            "now" => Some(now),
            "today" => at(today()?),
            "yesterday" => at(today()?.yesterday().ok()?),
            _ => with_zone(text).or_else(|| at(text.parse::<DateTime>().ok()?)),
        }
    };
    time().ok_or_else(|| {
        format!(
            "{text} is no time as in 2026-11-20, '2026-11-20 10:30', 2026-11-20T10:30Z or @SECONDS"
        )
    })
}

/// Parses `[[CC]YY]MMDDhhmm[.ss]`, the form of `touch -t`.
pub(crate) fn parse_stamp(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let time = || {
        let (digits, second) = match text.split_once('.') {
            Some((digits, second)) if second.len() == 2 => (digits, second),
            Some(_) => return None,
            None => (text, "00"),
        };
        if ![digits, second].concat().bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let number = |text: &str| text.parse::<i8>().ok();
        let (year, rest) = match digits.len() {
            8 => (local(now)?.year(), digits),
            // Two digits stand for the years 1969 to 2068.
            10 => match number(&digits[..2])? {
                year @ 69.. => (1900 + i16::from(year), &digits[2..]),
                year => (2000 + i16::from(year), &digits[2..]),
            },
            12 => (digits[..4].parse().ok()?, &digits[4..]),
            _ => return None,
        };
        let part = |at: usize| number(&rest[at..at + 2]);
        let date = Date::new(year, part(0)?, part(2)?).ok()?;
        let time = Time::new(part(4)?, part(6)?, number(second)?, 0).ok()?;
        at(date.to_datetime(time))
    };
    time().ok_or_else(|| format!("{text} is no stamp: [[CC]YY]MMDDhhmm[.ss]"))
}

fn local(now: Timestamp) -> Option<Zoned> {
    Some(jiff::Timestamp::from_second(now.secs).ok()?.to_zoned(zone().clone()))
}

fn since_1970(text: &str) -> Option<Timestamp> {
    let (secs, part) = text.split_once('.').unwrap_or((text, ""));
    if part.len() > 9 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: u32 = format!("{part:0<9}").parse().ok()?;
    let whole: i64 = secs.parse().ok()?;
    // Half a second before -1 is -1.5 s: -2 seconds and 500,000,000 nanoseconds.
    Some(match nanos {
        1.. if secs.starts_with('-') => {
            Timestamp { secs: whole.checked_sub(1)?, nanos: 1_000_000_000 - nanos }
        }
        nanos => Timestamp { secs: whole, nanos },
    })
}

/// Parses a time that ends with a zone.
fn with_zone(text: &str) -> Option<Timestamp> {
    // The space in `2026-11-20 10:30 +0100` is not in the standard, so it is removed.
    let (time, sign) = text
        .rsplit_once(' ')
        .filter(|(_, zone)| zone.starts_with(['+', '-', 'Z']))
        .map_or((text.to_owned(), false), |(time, zone)| (format!("{time}{zone}"), true));
    let with_minutes = |time: &str| {
        let at = time.rfind(['+', '-'])?;
        let is_short = sign && time.len() - at == 5;
        is_short.then(|| format!("{}:{}", &time[..at + 3], &time[at + 3..]))
    };
    let time = with_minutes(&time).unwrap_or(time);
    of(time.parse::<jiff::Timestamp>().ok()?)
}

/// A time on the caller's clock.
fn at(time: DateTime) -> Option<Timestamp> {
    of(time.to_zoned(zone().clone()).ok()?.timestamp())
}

fn of(time: jiff::Timestamp) -> Option<Timestamp> {
    // Before 1970, jiff counts nanoseconds downwards and [`Timestamp`] counts them upwards.
    let (secs, nanos) = (time.as_second(), time.subsec_nanosecond());
    let (secs, nanos) = if nanos < 0 { (secs - 1, nanos + 1_000_000_000) } else { (secs, nanos) };
    Some(Timestamp { secs, nanos: u32::try_from(nanos).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp { secs: 1_795_167_000, nanos: 5 };

    #[test]
    fn times_with_zones() {
        for (text, secs, nanos) in [
            ("@0", 0, 0),
            ("@1795167000.25", 1_795_167_000, 250_000_000),
            ("@-1.5", -3 + 1, 500_000_000),
            ("2026-11-20T09:30Z", 1_795_167_000, 0),
            ("2026-11-20T10:30:00.5+01:00", 1_795_167_000, 500_000_000),
            ("2026-11-20 10:30 +0100", 1_795_167_000, 0),
            ("2026-11-20 10:30:00.000000005 +0100", 1_795_167_000, 5),
            ("1969-12-31T23:59:59.75Z", -1, 750_000_000),
            ("now", NOW.secs, NOW.nanos),
        ] {
            assert_eq!(parse_time(text, NOW), Ok(Timestamp { secs, nanos }), "{text}");
        }
        for text in ["", "@", "@x", "@1.x", "soon", "2026-13-01", "2026-11-20T25:00", "10:30"] {
            parse_time(text, NOW).expect_err(text);
        }
    }

    #[test]
    fn stamps() {
        let same = |stamp: &str, time: &str| {
            assert_eq!(parse_stamp(stamp, NOW), parse_time(time, NOW), "{stamp}");
        };
        same("202611200930.15", "2026-11-20 09:30:15");
        same("2611200930", "2026-11-20 09:30");
        same("7001010000", "1970-01-01");
        for text in ["", "1", "20261120093", "2026112009300", "202611200930.1", "20261a200930"] {
            parse_stamp(text, NOW).expect_err(text);
        }
        assert!(parse_stamp("11200930", NOW).is_ok());
    }
}
